"""Plan which incidents the operator itself opens, ends and deletes.

It opens incidents for OOM kills and crash loops, and ends those of deleted replicas. It deletes old
incidents and limits open ones, so that no pod can fill etcd.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from plimsoll_api.incident_object import make_conditions, make_object
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incidents import ENDED_PHASES, IncidentKind, IncidentPhase
from plimsoll_api.leakincident import (
    MAX_INCIDENT_CONDITIONS,
    MAX_STATUS_WRITES,
    MAX_TOTAL_TEXT_CHARS,
)
from plimsoll_api.names import API_GROUP, API_VERSION, INCIDENT_KIND, POLICY_KIND
from plimsoll_api.supervisor_config import GroupMember, ServiceRef
from plimsoll_api.times import parse_rfc3339
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.fleet.group_loops import RECREATION_WINDOW_S, GroupStarts
from plimsoll_operator.fleet.pods import Container, PodView
from plimsoll_operator.kinds import Object
from plimsoll_operator.render import names

REPORT_GRACE_S = 30.0
"""Seconds for which the operator waits for a supervisor to report an OOM kill."""
MIN_CRASH_RESTARTS = 3
REPLACE_STEP = "PodReplace"
REQUESTED_OUTCOMES = frozenset({"Requested", "Begun"})
ENGINE_RESTART_STEP = "EngineRestart"
GROUP_RECREATED_OUTCOMES = frozenset({"Begun", "Succeeded"})
"""Outcomes of an engine restart that recreated the group. The restart may kill the supervisor
before it reports success."""
MAX_KEPT_INCIDENTS_PER_POD = 10
"""Incidents kept for each pod: half of the API's ``MAX_INCIDENTS_PER_POD``, so that a name is
always free."""
MAX_OPEN_INCIDENTS = 500
"""Open incidents kept for each service or policy: enough for one per replica."""
MAX_KEPT_INCIDENTS_PER_NAMESPACE = 2000
MAX_GROUP_NAME_CHARS, MAX_POD_PREFIX_CHARS = 63, 220
"""Maximum lengths of a group's name, and of a pod's name within an incident's name."""
_SUSPECTED_PHASES = frozenset({None, IncidentPhase.OPEN, IncidentPhase.TRIMMING})


@dataclass
class IncidentChanges:
    """Incidents to create or update, pods to evict, and the delay of the next check in seconds."""

    new: list[Object] = field(default_factory=list)
    updates: list[Object] = field(default_factory=list)
    evict: list[PodView] = field(default_factory=list)
    requeue_s: float | None = None


def plan_incidents(
    service: Object,
    pods: Sequence[PodView],
    incidents: list[Object],
    now: str,
    groups: Sequence[GroupStarts] = (),
    max_ended: float = math.inf,
) -> IncidentChanges:
    """Return the incidents to open or end, and the pods to evict.

    ``pods`` include terminating ones, and ``now`` is RFC 3339. ``max_ended`` is the number of ended
    incidents that :func:`find_surplus_incidents` keeps.
    """
    changes = IncidentChanges()
    _update_group_incidents(changes, service, groups, incidents, now)
    for pod in pods:
        for container in pod.containers:
            if container.name in (names.ENGINE, names.SUPERVISOR):
                _add_oom_kills(changes, service, pod, container, incidents, now, max_ended)
                _add_crash_loops(changes, service, pod, container, incidents, now)
    present = {pod.name: pod for pod in pods}
    replaced: dict[str, PodView] = {}
    for one in filter(_is_open, incidents):
        if _is_group_incident(one):
            continue
        pod_name = one["spec"]["pod"]
        if not _has_own_pod(one, present.get(pod_name)):
            _end_orphaned_incident(changes, one, pod_name in present, now)
        elif ((one.get("status") or {}).get("revision") or 0) >= MAX_STATUS_WRITES:
            # A supervisor keeps its last write for the end, so another client used its token.
            text = (
                f"the status was updated {MAX_STATUS_WRITES} times, which is the maximum, so the"
                " supervisor cannot end the incident"
            )
            _end_incident(changes, one, "Unresolved", "WritesExhausted", text, now)
        elif _is_replacement_requested(one) and not present[pod_name].terminating:
            replaced[pod_name] = present[pod_name]
    changes.evict = [replaced[name] for name in sorted(replaced)]
    return changes


def _add_oom_kills(
    changes: IncidentChanges, service: Object, pod: PodView, container: Container,
    incidents: list[Object], now: str, max_ended: float,
) -> None:  # fmt: skip
    for ended in container.terminations:
        at = str(ended.get("finishedAt"))
        killed_s = _parse_time(at)
        if ended.get("reason") != "OOMKilled" or killed_s is None:
            continue
        name = _make_incident_name(pod.name, container, f"oom-{int(killed_s):x}")
        existing = _find_incident(name, incidents)
        others = [one for one in incidents if one is not existing]
        if _is_reported(pod.name, container.name, at, others):
            continue
        if _is_outdated(pod.name, at, others, max_ended):
            continue
        age_s = _compute_seconds_between(at, now)
        if age_s is not None and age_s < REPORT_GRACE_S and container.name == names.ENGINE:
            wait_s = min(REPORT_GRACE_S, REPORT_GRACE_S - age_s)  # a node's clock may be ahead
            changes.requeue_s = (
                wait_s if changes.requeue_s is None else min(changes.requeue_s, wait_s)
            )
            continue
        limit = f" at its memory limit of {container.memory}" if container.memory else ""
        status = {
            "phase": "Unresolved",
            "outcome": "ContainerRestarted",
            "message": (
                f"the kernel OOM-killed container {container.name}{limit}; its running requests"
                " were lost"
            ),
            "endedAt": now,
        }
        kind = "OutOfMemoryKill"
        made = _make_incident(service, name, pod.name, container, kind, at, status)
        _open_incident(changes, made, existing)


def _add_crash_loops(
    changes: IncidentChanges, service: Object, pod: PodView, container: Container,
    incidents: list[Object], now: str,
) -> None:  # fmt: skip
    open_ = [
        one for one in incidents
        if _is_open(one)
        and (one["spec"]["kind"], one["spec"]["pod"]) == ("CrashLoop", pod.name)
        and one["spec"].get("container") == container.name
        and _has_own_pod(one, pod)
    ]  # fmt: skip
    name = _make_incident_name(pod.name, container, f"crashes-{container.restarts}")
    existing = open_[0] if open_ else _find_incident(name, incidents)
    looping = container.is_backing_off and container.restarts >= MIN_CRASH_RESTARTS
    if looping:
        end = container.last_termination
        status = {
            "phase": "Confirmed",
            "confirmedAt": now,
            "message": (
                f"container {container.name} has terminated {container.restarts} times, last with"
                f" exit code {end.get('exitCode')}: {end.get('reason') or 'no reason given'}"
            ),
        }
        started = end.get("finishedAt") or now
        made = _make_incident(service, name, pod.name, container, "CrashLoop", started, status)
        _open_incident(changes, made, existing)
    elif container.ready:
        for one in open_:
            _end_incident(
                changes, one, "Resolved", "Recovered", "the container is ready again", now
            )


def _is_group_incident(incident: Object) -> bool:
    return incident["spec"]["kind"] == "CrashLoop" and bool(incident["spec"].get("podGroup"))


def _update_group_incidents(
    changes: IncidentChanges, policy: Object, groups: Sequence[GroupStarts],
    incidents: list[Object], now: str,
) -> None:  # fmt: skip
    open_ = {
        (one["spec"]["workloadRef"]["name"], one["spec"]["podGroup"]): one
        for one in incidents
        if _is_open(one) and _is_group_incident(one)
    }
    for group in groups:
        ref = group.leader.member.workload
        assert ref is not None, "a multi-node group belongs to a workload"
        existing = open_.pop((ref.name, group.leader.member.group[:MAX_GROUP_NAME_CHARS]), None)
        if group.is_looping:
            _open_incident(changes, _make_group_incident(policy, group, ref, now), existing)
        elif existing is not None and group.has_recovered:
            _end_incident(
                changes, existing, "Resolved", "Recovered", "the group is ready again", now
            )
        if (existing is not None or group.is_looping) and not group.has_recovered:
            changes.requeue_s = REPORT_GRACE_S
    for surplus in open_.values():
        age = _compute_seconds_between(surplus["metadata"].get("creationTimestamp") or now, now)
        if age is None or age >= RECREATION_WINDOW_S:
            _end_incident(
                changes, surplus, "Unresolved", "PodGone", "the group no longer exists", now
            )
        else:
            changes.requeue_s = REPORT_GRACE_S  # its leader may be recreated soon


def _make_group_incident(policy: Object, group: GroupStarts, ref: WorkloadRef, now: str) -> Object:
    meta, leader = policy["metadata"], group.leader
    member = GroupMember(leader.member.group[:MAX_GROUP_NAME_CHARS])
    service = ServiceRef(meta["name"], meta["namespace"], "", POLICY_KIND, ref, member, leader.role)
    text = (
        f"the group was recreated {group.recreations} times within {RECREATION_WINDOW_S / 60:.0f}"
        " minutes: read the logs of its containers while they run, with kubectl logs"
        f" {leader.name} --all-containers --follow"
    )
    opened = _parse_time(now) or 0.0
    record = IncidentRecord(
        name=f"{leader.name[:MAX_POD_PREFIX_CHARS]}-group-{int(opened):x}",
        kind=IncidentKind.CRASH_LOOP,
        epoch=f"group:{group.recreations}",
        opened_at=opened,
    )
    status = {"phase": "Confirmed", "confirmedAt": now, "message": text}
    made = make_object(record, record.name, service, leader.name, names.ENGINE)
    return made | {"status": _add_conditions(status, now)}


def _end_orphaned_incident(
    changes: IncidentChanges, incident: Object, has_successor: bool, now: str
) -> None:
    """End an incident whose pod no longer exists; wait if the store may not contain the pod yet."""
    age = _compute_seconds_between(incident["metadata"].get("creationTimestamp") or now, now)
    if not has_successor and age is not None and age < REPORT_GRACE_S:
        wait_s = min(REPORT_GRACE_S, REPORT_GRACE_S - age)
        changes.requeue_s = min(wait_s, changes.requeue_s or wait_s)
    elif _is_replacement_requested(incident):
        text = "the pod was replaced at the request of its supervisor"
        _end_incident(changes, incident, "Resolved", "PodReplaced", text, now)
    elif _has_restarted_group(incident):
        text = "the restart of the leader's engine recreated the group"
        _end_incident(changes, incident, "Resolved", ENGINE_RESTART_STEP, text, now)
    else:
        _end_incident(changes, incident, "Unresolved", "PodGone", "the pod no longer exists", now)


def _make_incident_name(pod: str, container: Container, suffix: str) -> str:
    end = f"-{container.name}-{suffix}"
    return pod[: 253 - len(end)] + end


def _find_incident(name: str, incidents: list[Object]) -> Object | None:
    return next((one for one in incidents if one["metadata"]["name"] == name), None)


def _open_incident(changes: IncidentChanges, made: Object, existing: Object | None) -> None:
    """Open the incident ``made``, unless it exists.

    The status is a write of its own, so an ``existing`` one without a status gets it now.
    """
    if existing is None:
        changes.new.append(made)
    elif not existing.get("status"):
        meta = {key: existing["metadata"][key] for key in ("name", "namespace")}
        changes.updates.append(
            {key: made[key] for key in ("apiVersion", "kind", "status")} | {"metadata": meta}
        )


def _is_replacement_requested(incident: Object) -> bool:
    steps = (incident.get("status") or {}).get("timeline") or ()
    return any(
        one.get("step") == REPLACE_STEP and one.get("outcome") in REQUESTED_OUTCOMES
        for one in steps[-1:]
    )


# Only the creation times are compared, because the API server sets them.
def _has_own_pod(incident: Object, pod: PodView | None) -> bool:
    if pod is None:
        return False
    delay_s = _compute_seconds_between(
        str(incident["metadata"].get("creationTimestamp")), pod.created
    )
    return delay_s is None or delay_s <= 0


def _has_restarted_group(incident: Object) -> bool:
    steps = (incident.get("status") or {}).get("timeline") or ()
    done = any(
        one.get("step") == ENGINE_RESTART_STEP and one.get("outcome") in GROUP_RECREATED_OUTCOMES
        for one in steps
    )
    return done and bool(incident["spec"].get("podGroup"))


def _is_reported(pod: str, container: str, killed_at: str, incidents: list[Object]) -> bool:
    return any(
        (one["spec"]["kind"], one["spec"]["pod"]) == ("OutOfMemoryKill", pod)
        and one["spec"].get("container") == container
        and (apart := _compute_seconds_between(one["spec"]["openedAt"], killed_at)) is not None
        and abs(apart) < 2 * REPORT_GRACE_S
        for one in incidents
    )


# The pod's status still shows a kill whose incident was deleted for later ones.
def _is_outdated(pod: str, killed_at: str, incidents: list[Object], max_ended: float) -> bool:
    later = [
        one
        for one in incidents
        if (after_s := _compute_seconds_between(killed_at, one["spec"]["openedAt"])) is not None
        and after_s >= 0
    ]
    of_pod = sum(one["spec"]["pod"] == pod for one in later)
    ended = sum(not _is_open(one) for one in later)
    return of_pod >= MAX_KEPT_INCIDENTS_PER_POD or ended >= max_ended


def _make_incident(
    service: Object, name: str, pod: str, container: Container, kind: str, opened_at: str,
    status: dict[str, Any],
) -> Object:  # fmt: skip
    meta = service["metadata"]
    namespace, labels = meta["namespace"], names.make_selector(meta["name"])
    return {
        "apiVersion": API_VERSION,
        "kind": INCIDENT_KIND,
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "id": name,
            "workloadRef": {"apiGroup": API_GROUP, "kind": service["kind"], "name": meta["name"]},
            "pod": pod,
            "container": container.name,
            "epoch": f"container:{container.restarts}",
            "openedAt": opened_at,
            "kind": kind,
        },
        "status": _add_conditions(status, opened_at),
    }


# Texts are truncated to the limits of the CRD. The resource version makes the API server refuse the
# update if a supervisor has written the status meanwhile, or if the incident is a later one.
def _end_incident(
    changes: IncidentChanges, incident: Object, phase: str, outcome: str, message: str, now: str
) -> None:
    identity = {key: incident[key] for key in ("apiVersion", "kind")}
    meta = incident["metadata"]
    name = {key: meta[key] for key in ("name", "namespace", "resourceVersion") if key in meta}
    before = incident.get("status") or {}
    text = message[: max(0, MAX_TOTAL_TEXT_CHARS - _count_text_chars(before))]
    status = {"phase": phase, "outcome": outcome, "message": text, "endedAt": now}
    ended = _add_conditions(status, incident["spec"].get("openedAt") or now)
    existing = {one.get("type") for one in before.get("conditions") or ()}
    added = [one for one in ended["conditions"] if one["type"] not in existing]
    omitted = added[max(0, MAX_INCIDENT_CONDITIONS - len(existing)) :]
    ended["conditions"] = [one for one in ended["conditions"] if one not in omitted]
    changes.updates.append(identity | {"metadata": name, "status": ended})


def _count_text_chars(status: Object) -> int:
    """Return the number of characters in a status, except its message, as the CRD counts them."""
    entries = [*(status.get("timeline") or ()), *(status.get("conditions") or ())]
    attribution = status.get("attribution") or {}
    texts = [*(status.get("diagnostics") or ()), *(attribution.get("evidence") or ())]
    return sum(map(len, [*texts, *(one.get("message") or "" for one in entries)]))


# An incident's spec never changes, so its generation is always 1.
def _add_conditions(status: Object, opened_at: str) -> Object:
    added = make_conditions(
        status["phase"], status.get("outcome"), opened_at, status.get("endedAt")
    )
    return status | {"observedGeneration": 1, "conditions": msgspec.to_builtins(added)}


# In Unix seconds. The schema's ``date-time`` accepts malformed times, for example without a time
# zone.
def _parse_time(timestamp: str) -> float | None:
    try:
        return parse_rfc3339(timestamp)
    except (ValueError, OverflowError):
        return None


def _compute_seconds_between(since: str, until: str) -> float | None:
    begin, end = _parse_time(since), _parse_time(until)
    return None if begin is None or end is None else end - begin


def find_surplus_incidents(
    incidents: Iterable[Object], max_ended: int, now: str, min_age_s: float, other_count: int = 0
) -> list[Object]:
    """Return the incidents of a service or policy that exceed a limit, oldest first.

    Ended incidents are deleted first. The newest confirmed incident and all incidents younger than
    ``min_age_s`` are kept. ``other_count`` is the number of other incidents in the namespace.
    ``now`` is RFC 3339.
    """
    order = sorted(incidents, key=lambda one: (_is_open(one), _get_creation_time(one)))
    newest = max(filter(_is_confirmed, order), key=_get_creation_time, default=None)
    free = {_get_uid(one) for one in order if one is not newest and _is_old(one, now, min_age_s)}
    of_pods: dict[str, list[Object]] = defaultdict(list)
    for one in order:
        of_pods[str(one["spec"].get("pod"))].append(one)
    surplus: dict[str, Object] = {}

    def add_surplus(candidates: list[Object], allowed: int) -> None:
        left = [one for one in candidates if _get_uid(one) not in surplus]
        over = max(0, len(left) - allowed)
        for one in [one for one in left if _get_uid(one) in free][:over]:
            surplus[_get_uid(one)] = one

    for incidents_of_pod in of_pods.values():
        add_surplus(incidents_of_pod, MAX_KEPT_INCIDENTS_PER_POD)
    add_surplus([one for one in order if not _is_open(one)], max_ended)
    add_surplus([one for one in order if _is_open(one)], MAX_OPEN_INCIDENTS)
    add_surplus(order, max(0, MAX_KEPT_INCIDENTS_PER_NAMESPACE - other_count))
    return sorted(surplus.values(), key=_get_creation_time)


def _get_uid(incident: Object) -> str:
    meta = incident["metadata"]
    return str(meta.get("uid") or meta["name"])


def _get_creation_time(incident: Object) -> str:
    return str(incident["metadata"].get("creationTimestamp") or "")


def _is_confirmed(incident: Object) -> bool:
    status = incident.get("status") or {}
    return bool(status.get("confirmedAt")) or status.get("phase") not in {
        *_SUSPECTED_PHASES,
        *ENDED_PHASES,
    }


def _is_old(incident: Object, now: str, min_age_s: float) -> bool:
    age = _compute_seconds_between(_get_creation_time(incident), now)
    return age is not None and age >= min_age_s


def _is_open(incident: Object) -> bool:
    return (incident.get("status") or {}).get("phase") not in ENDED_PHASES
