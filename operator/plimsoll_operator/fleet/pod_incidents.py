"""Incidents that only pods tell of: kills for memory, crash loops, and replicas that are gone.

A supervisor tells of its engine's kill itself; the operator waits for that, and tells of the rest.
Names are made of the pod and its restart, so that the same kill is told once whoever sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from plimsoll_api.incident_object import conditions_of
from plimsoll_api.incidents import ENDED
from plimsoll_api.leakincident import MAX_CONDITIONS, MAX_TEXTS, MAX_WRITES
from plimsoll_api.names import API_GROUP, API_VERSION, INCIDENT_KIND
from plimsoll_api.times import unix_seconds
from plimsoll_operator.kinds import Object
from plimsoll_operator.render import names

GRACE_S = 30.0
"""So long the supervisor has to tell of a kill by itself."""
CRASHES = 3
REPLACE = "PodReplace"
REQUESTED = frozenset({"Requested", "Begun"})
ENGINE_RESTART = "EngineRestart"
BEGUN = frozenset({"Begun", "Succeeded"})
"""The supervisor of a group that is recreated may end before it can tell of its success."""


@dataclass
class Findings:
    """``new`` incidents, ``updates`` of statuses, pods to ``evict``, when to look ``again``."""

    new: list[Object] = field(default_factory=list)
    updates: list[Object] = field(default_factory=list)
    evict: list[str] = field(default_factory=list)
    again_s: float | None = None


def examine(service: Object, pods: list[Object], incidents: list[Object], now: str) -> Findings:
    """Find incidents that only pods tell of, requests and orphans.

    ``pods`` are all pods of the service, terminating ones too. ``now`` is RFC 3339.
    """
    found = Findings()
    known = {one["metadata"]["name"]: one for one in incidents}
    for pod in pods:
        for container in _statuses(pod):
            _kills(found, service, pod, container, incidents, known, now)
            _crashes(found, service, pod, container, incidents, known, now)
    _requests(found, pods, incidents)
    _orphans(found, pods, incidents, now)
    _unwritable(found, incidents, now)
    return found


def _kills(
    found: Findings,
    service: Object,
    pod: Object,
    container: Object,
    incidents: list[Object],
    known: dict[str, Object],
    now: str,
) -> None:
    for state in (container.get("state"), container.get("lastState")):
        ended = (state or {}).get("terminated") or {}
        at = str(ended.get("finishedAt"))
        when = _time(at)
        if ended.get("reason") != "OOMKilled" or when is None:
            continue
        pod_name = pod["metadata"]["name"]
        name = _named(pod_name, container, f"oom-{int(when):x}")
        if name in known or _reported(pod_name, container["name"], at, incidents):
            continue
        age = _seconds(at, now)
        if age is not None and age < GRACE_S and container["name"] == names.ENGINE:
            wait = min(GRACE_S, GRACE_S - age)  # a node's clock may be ahead of ours
            found.again_s = wait if found.again_s is None else min(found.again_s, wait)
            continue
        limit = _limit(pod, container["name"])
        status = {
            "phase": "Unresolved",
            "outcome": "ContainerRestarted",
            "message": f"the kernel OOM-killed container {container['name']}"
            + (f" at its memory limit of {limit}" if limit else "")
            + "; no request could be carried over",
            "endedAt": now,
        }
        found.new.append(
            _incident(service, name, pod_name, container, "OutOfMemoryKill", at, status)
        )


def _crashes(
    found: Findings, service: Object, pod: Object, container: Object, incidents: list[Object],
    known: dict[str, Object], now: str,
) -> None:  # fmt: skip
    """Find crash loops: an incident ends once the container is ready; a later loop is a new one."""
    pod_name, restarts = pod["metadata"]["name"], container.get("restartCount", 0)
    waiting = (container.get("state") or {}).get("waiting") or {}
    looping = waiting.get("reason") == "CrashLoopBackOff" and restarts >= CRASHES
    open_ = [
        one
        for one in incidents
        if _open(one)
        and (one["spec"]["kind"], one["spec"]["pod"]) == ("CrashLoop", pod_name)
        and one["spec"].get("container") == container["name"]
        and _lives(one, pod)
    ]
    name = _named(pod_name, container, f"crashes-{restarts}")
    if looping and not open_ and name not in known:
        ended = (container.get("lastState") or {}).get("terminated") or {}
        code = ended.get("exitCode")
        status = {
            "phase": "Confirmed",
            "confirmedAt": now,
            "message": f"container {container['name']} ended {container['restartCount']} times; "
            f"the last exit code was {code}: {ended.get('reason') or 'no reason given'}",
        }
        begun = ended.get("finishedAt") or now
        found.new.append(_incident(service, name, pod_name, container, "CrashLoop", begun, status))
    elif container.get("ready"):
        text = "the container is ready"
        found.updates += [_end(one, "Resolved", "Recovered", text, now) for one in open_]


def _named(pod: str, container: Object, what: str) -> str:
    """Return the name of an incident of a container: at most 253 characters."""
    end = f"-{container['name']}-{what}"
    return pod[: 253 - len(end)] + end


def _requests(found: Findings, pods: list[Object], incidents: list[Object]) -> None:
    present = {pod["metadata"]["name"] for pod in pods if not _leaving(pod)}
    living = {pod["metadata"]["name"]: pod for pod in pods}
    wanted = {
        one["spec"]["pod"]
        for one in incidents
        if _open(one) and _asks_for_a_pod(one) and _lives(one, living.get(one["spec"]["pod"]))
    }
    found.evict += sorted(wanted & present)


def _orphans(found: Findings, pods: list[Object], incidents: list[Object], now: str) -> None:
    present = {pod["metadata"]["name"]: pod for pod in pods}
    for one in incidents:
        if not _open(one) or _lives(one, present.get(one["spec"]["pod"])):
            continue
        age = _seconds(one["metadata"].get("creationTimestamp") or now, now)
        if age is not None and age < GRACE_S:
            found.again_s = GRACE_S
        elif _asks_for_a_pod(one):
            text = "the pod was replaced at the supervisor's request"
            found.updates.append(_end(one, "Resolved", "PodReplaced", text, now))
        elif _restarted_group(one):
            text = "the restart of the leader's engine recreated the group"
            found.updates.append(_end(one, "Resolved", ENGINE_RESTART, text, now))
        else:
            text = "the pod no longer exists"
            found.updates.append(_end(one, "Unresolved", "PodGone", text, now))


def _unwritable(found: Findings, incidents: list[Object], now: str) -> None:
    """End the incidents of which no supervisor can write the end: their writes are used up.

    A supervisor keeps the last write for the end, so another client of the pod's token wrote them.
    """
    ending = {one["metadata"]["name"] for one in found.updates}
    text = f"the status was written {MAX_WRITES} times, so its supervisor cannot end it"
    found.updates += [
        _end(one, "Unresolved", "WritesExhausted", text, now)
        for one in incidents
        if _open(one)
        and ((one.get("status") or {}).get("revision") or 0) >= MAX_WRITES
        and one["metadata"]["name"] not in ending
    ]


def _asks_for_a_pod(incident: Object) -> bool:
    steps = (incident.get("status") or {}).get("timeline") or ()
    return any(one.get("step") == REPLACE and one.get("outcome") in REQUESTED for one in steps[-1:])


def _lives(incident: Object, pod: Object | None) -> bool:
    """Whether the incident's own pod is there: a StatefulSet gives the next one the same name.

    Both times are the API server's.
    """
    if pod is None:
        return False
    apart = _seconds(
        str(incident["metadata"].get("creationTimestamp")),
        str(pod["metadata"].get("creationTimestamp")),
    )
    return apart is None or apart <= 0


def _restarted_group(incident: Object) -> bool:
    """Whether a multi-node group was restarted for it: all processes of the group are new."""
    steps = (incident.get("status") or {}).get("timeline") or ()
    done = any(one.get("step") == ENGINE_RESTART and one.get("outcome") in BEGUN for one in steps)
    return done and bool(incident["spec"].get("podGroup"))


def _reported(pod: str, container: str, at: str, incidents: list[Object]) -> bool:
    return any(
        one["spec"]["kind"] == "OutOfMemoryKill"
        and one["spec"]["pod"] == pod
        and one["spec"].get("container") == container
        and (apart := _seconds(one["spec"]["openedAt"], at)) is not None
        and abs(apart) < 2 * GRACE_S
        for one in incidents
    )


def _incident(
    service: Object, name: str, pod: str, container: Object, kind: str, at: str,
    status: dict[str, Any],
) -> Object:  # fmt: skip
    meta = service["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": INCIDENT_KIND,
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": names.selector(meta["name"]),
        },
        "spec": {
            "id": name,
            "workloadRef": {
                "apiGroup": API_GROUP,
                "kind": service["kind"],
                "name": meta["name"],
            },
            "pod": pod,
            "container": container["name"],
            "epoch": f"container:{container.get('restartCount', 0)}",
            "openedAt": at,
            "kind": kind,
        },
        "status": _with_conditions(status, at),
    }


def _end(incident: Object, phase: str, outcome: str, message: str, now: str) -> Object:
    """Build the status that ends the incident, within what its writer left of the bounds."""
    about = {key: incident[key] for key in ("apiVersion", "kind")}
    name = {key: incident["metadata"][key] for key in ("name", "namespace")}
    before = incident.get("status") or {}
    text = message[: max(0, MAX_TEXTS - _characters(before))]
    status = {"phase": phase, "outcome": outcome, "message": text, "endedAt": now}
    ended = _with_conditions(status, incident["spec"].get("openedAt") or now)
    held = {one.get("type") for one in before.get("conditions") or ()}
    fresh = [one for one in ended["conditions"] if one["type"] not in held]
    left_out = fresh[max(0, MAX_CONDITIONS - len(held)) :]
    ended["conditions"] = [one for one in ended["conditions"] if one not in left_out]
    return about | {"metadata": name, "status": ended}


def _characters(status: Object) -> int:
    """Count the characters of all texts of a status but its message, as its schema does."""
    told = [*(status.get("timeline") or ()), *(status.get("conditions") or ())]
    attribution = status.get("attribution") or {}
    texts = [*(status.get("diagnostics") or ()), *(attribution.get("evidence") or ())]
    return sum(map(len, [*texts, *(one.get("message") or "" for one in told)]))


def _with_conditions(status: Object, opened_at: str) -> Object:
    """Return the status with its conditions, of the only generation that an incident has."""
    found = conditions_of(status["phase"], status.get("outcome"), opened_at, status.get("endedAt"))
    return status | {"observedGeneration": 1, "conditions": msgspec.to_builtins(found)}


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    found = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    return [one for one in found if one["name"] in (names.ENGINE, names.SUPERVISOR)]


def _limit(pod: Object, container: str) -> str | None:
    spec = pod.get("spec") or {}
    for one in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        if one["name"] == container:
            limit = ((one.get("resources") or {}).get("limits") or {}).get("memory")
            return str(limit) if limit else None
    return None


def _open(incident: Object) -> bool:
    return (incident.get("status") or {}).get("phase") not in ENDED


def _leaving(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _time(at: str) -> float | None:
    """Unix seconds of a time as the API writes it; None where it is none, or has no zone.

    An incident's times are its supervisor's: the schema's ``date-time`` lets through some that
    cannot be compared.
    """
    try:
        return unix_seconds(at)
    except (ValueError, OverflowError):
        return None


def _seconds(since: str, until: str) -> float | None:
    """Seconds between two times, None where one of them is unknown."""
    begin, end = _time(since), _time(until)
    return None if begin is None or end is None else end - begin
