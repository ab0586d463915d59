"""Revisions: which one leaks, which one is wanted, which one runs, and which one to go back to.

The same leak in most replicas of one revision is the revision's, not a replica's. A pod's revision
is its label; of a pod that is gone it is that of its ReplicaSet's other pods. What a ReplicaSet
does not make is only known while it is there.

``status.revisions`` keeps the rest: ``update`` is the present spec's, ``current`` the last one that
was rolled out completely, ``good`` those to go back to, newest first. A revision is good once it
ran in all replicas, and no longer when most of them leak or somebody goes back from it. That is
decided with the roll-back, not at its end: the spec may change while pods are still replaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.operation import OnLeak, RunRevision
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod, State
from plimsoll_operator.fleet.workloads import Workload
from plimsoll_operator.kinds import Object

LEAKS = frozenset({"HostGrowth", "DeviceGrowth", "CapacityLoss", "OutOfMemoryKill"})
MIN_LEAKING = 2
"""One replica's leak is an incident."""

MAX_CHANGES = 16
MADE_IN_SETS = ("Deployment", "Rollout")
"""Kinds whose pods have the name of their ReplicaSet, which has a revision of its own."""


@dataclass(frozen=True)
class Suspect:
    """``since`` is when the leak began in the replica that made it most of them (RFC 3339)."""

    revision: str
    leak: str
    since: str
    leaking: int
    replicas: int


class ReplicaPod(NamedTuple):
    """A pod as evidence.

    ``replica`` names what it is, or is a part of; ``in_set`` says whether a ReplicaSet made it;
    ``created`` is RFC 3339, empty if no other pod ever has its name.
    """

    pod: str
    revision: str
    replica: str
    in_set: bool = True
    created: str = ""


def of_pods(pods: Iterable[PodView]) -> list[ReplicaPod]:
    """Return the pods of an InferenceService as evidence."""
    return [ReplicaPod(pod.name, pod.revision, pod.name) for pod in pods]


def find(revision: str, pods: list[ReplicaPod], incidents: list[Object]) -> Suspect | None:
    """Whether most replicas of ``revision`` have the same leak; the earliest such leak."""
    present = {pod.pod: pod for pod in pods}
    of_sets = {_set(pod.pod): pod.revision for pod in pods if pod.in_set}
    replicas = len({pod.replica for pod in pods if pod.revision == revision})
    first: dict[str, dict[str, str]] = defaultdict(dict)
    for incident in incidents:
        spec = incident["spec"]
        if spec["kind"] not in LEAKS or not _confirmed(incident):
            continue
        pod = present.get(spec["pod"])
        if pod is not None and incident["metadata"].get("creationTimestamp", "") < pod.created:
            continue  # of an earlier pod of this name, whose revision nobody knows
        if (pod.revision if pod else of_sets.get(_set(spec["pod"]))) != revision:
            continue
        seen, replica = first[_leak(incident)], pod.replica if pod else spec["pod"]
        seen[replica] = min(seen.get(replica, spec["openedAt"]), spec["openedAt"])
    needed = max(MIN_LEAKING, replicas // 2 + 1)
    found = [
        Suspect(revision, leak, sorted(begun.values())[needed - 1], len(begun), replicas)
        for leak, begun in first.items()
        if len(begun) >= needed
    ]
    return min(found, key=lambda one: (one.since, one.leak), default=None)


def suspect_status(
    suspect: Suspect | None, before: Object, update: str, action: str, changed: list[str]
) -> dict[str, Any] | None:
    """``status.suspectRevision``: as known now, else as known before of the same revision."""
    known: dict[str, Any] | None = before.get("suspectRevision")
    if suspect is None:
        return known | {"action": action} if known and known.get("revision") == update else None
    return {
        "revision": suspect.revision,
        "leak": suspect.leak,
        "since": suspect.since,
        "leakingReplicas": suspect.leaking,
        "replicas": suspect.replicas,
        "action": action,
        "changed": changed,
    }


def changes(before: Any, after: Any, path: str = "") -> list[str]:
    """Paths of a pod template that differ, as people write them; bounded."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        parts = (changes(before.get(k), after.get(k), f"{path}.{k}") for k in keys)
        return [one for part in parts for one in part][:MAX_CHANGES]
    if _named(before) and _named(after):
        old, new = ({one["name"]: one for one in items} for items in (before, after))
        keys = sorted(old.keys() | new.keys())
        parts = (changes(old.get(k), new.get(k), f"{path}[{k}]") for k in keys)
        return [one for part in parts for one in part][:MAX_CHANGES]
    if before == after:
        return []
    return [f"{path.removeprefix('.')}: {_short(before)} -> {_short(after)}"]


def _named(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(i, dict) and "name" in i for i in items)


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _confirmed(incident: Object) -> bool:
    status = incident.get("status") or {}
    return status.get("phase") not in (None, "Open") and status.get("outcome") != "Cleared"


def _leak(incident: Object) -> str:
    attribution = (incident.get("status") or {}).get("attribution") or {}
    segment = attribution.get("segment")
    kind = str(incident["spec"]["kind"])
    return f"{kind} in {segment}" if segment else kind


def _set(pod: str) -> str:
    """Name of the ReplicaSet: a pod's name without its last part."""
    return pod.rpartition("-")[0]


def suspects(
    workloads: Sequence[Workload], incidents: Sequence[Object], before: Mapping[str, Object]
) -> dict[WorkloadRef, Object]:
    """``suspectRevision`` by workload, for those that have one.

    ``before`` is the last status of each workload, by KIND/NAME: evidence ages, but a revision
    stays suspect as long as it has pods. Pods that nothing controls have no revision.
    """
    of_present, of_gone = _by_pod(workloads, incidents)
    found: dict[WorkloadRef, Object] = {}
    for workload in workloads:
        if workload.ref is None:
            continue
        known = before.get(str(workload.ref)) or {}
        own = [*of_present.get(workload.ref, ()), *_of_sets(workload, of_gone)]
        if not own and "suspectRevision" not in known:
            continue
        pods = [_evidence(one) for one in workload.pods if one.state is not State.LEAVING]
        revisions = sorted({one.revision for one in pods} - {""})
        suspected = [suspect for name in revisions if (suspect := find(name, pods, own))]
        first = min(suspected, key=lambda suspect: suspect.since, default=None)
        kept = (known.get("suspectRevision") or {}).get("revision")
        shown = suspect_status(first, known, kept if kept in revisions else "", "Reported", [])
        if shown:
            found[workload.ref] = shown
    return found


def _by_pod(
    workloads: Sequence[Workload], incidents: Sequence[Object]
) -> tuple[dict[WorkloadRef | None, list[Object]], dict[str, list[Object]]]:
    """Incidents by the workload of their pod, and by pod those of pods that are gone."""
    owners = {pod.name: one.ref for one in workloads for pod in one.pods}
    present: dict[WorkloadRef | None, list[Object]] = {}
    gone: dict[str, list[Object]] = {}
    for incident in incidents:
        pod = incident["spec"]["pod"]
        if pod in owners:
            present.setdefault(owners[pod], []).append(incident)
        else:
            gone.setdefault(pod, []).append(incident)
    return present, gone


def _of_sets(workload: Workload, of_gone: Mapping[str, list[Object]]) -> list[Object]:
    """Incidents of pods that are gone, of a ReplicaSet that the workload has now."""
    if not of_gone:
        return []
    sets = tuple({_prefix(one) for one in workload.pods if _in_set(one)})
    return [one for pod, some in of_gone.items() if pod.startswith(sets) for one in some]


def _evidence(pod: SelectedPod) -> ReplicaPod:
    member = pod.member
    return ReplicaPod(
        pod.name, member.revision, member.replica(pod.name), _in_set(pod), pod.created
    )


def _prefix(pod: SelectedPod) -> str:
    name = pod.member.workload.name if pod.member.workload else ""
    return f"{name}-{pod.member.revision}-"


def _in_set(pod: SelectedPod) -> bool:
    """Whether the pod's name says its revision: Kubernetes cuts long names off."""
    ref = pod.member.workload
    return ref is not None and ref.kind in MADE_IN_SETS and pod.name.startswith(_prefix(pod))


@dataclass(frozen=True)
class RolloutDecision:
    """What a rollout does about a bad revision.

    ``revision`` is the one to run; ``requested`` says that a person asked for the last good one,
    not a leak.
    """

    revision: str
    paused: bool = False
    action: str = "None"
    requested: bool = False


MAX_GOOD = 2
"""The spec's own revision may be one of them; then there is another one to go back to."""


def advanced(before: Object, update: str, rolled_out: str, bad: str) -> Object:
    """``status.revisions`` after an observation.

    ``rolled_out`` is the revision that runs in all replicas, empty while a roll-out is under way;
    ``bad`` is one that leaks or that is gone back from, empty where there is none.
    """
    known = dict.fromkeys([rolled_out, *good(before)])
    kept = [one for one in known if one not in ("", bad)][:MAX_GOOD]
    current = rolled_out or before.get("current", "")
    previous = next((one for one in kept if one != current), "")
    named = {"update": update, "current": current, "previous": previous}
    return {key: value for key, value in named.items() if value} | {"good": kept}


def good(revisions: Object) -> list[str]:
    """Good revisions, newest first. Earlier operators wrote ``current`` and ``previous`` alone."""
    if "good" in revisions:
        return list(revisions["good"])
    return [revisions[name] for name in ("current", "previous") if revisions.get(name)]


def decide(
    service: InferenceService,
    status: Object,
    update: str,
    suspect: Suspect | None,
    known: Collection[str],
    running: str = "",
) -> RolloutDecision:
    """Decide which revision to run.

    ``known`` are the revisions whose template still exists, and ``running`` is the one that the
    Deployment has. A rollback that was begun goes on until the spec changes: its evidence ages and
    goes.
    """
    target = last_good(status.get("revisions") or {}, update, known, running)
    if service.spec.rollout.revision is RunRevision.LAST_GOOD:
        if target:
            return RolloutDecision(target, action="RolledBack", requested=True)
        return RolloutDecision(update, requested=True)
    known_suspect = (status.get("suspectRevision") or {}).get("revision") == update
    if not known_suspect and suspect is None:
        return RolloutDecision(update)
    match service.spec.rollout.on_leak:
        case OnLeak.CONTINUE:
            return RolloutDecision(update, action="Reported")
        case OnLeak.HOLD:
            return _held(status, update)
        case OnLeak.ROLLBACK:
            if target:
                return RolloutDecision(target, action="RolledBack")
            return _held(status, update)


def last_good(revisions: Object, update: str, known: Collection[str], running: str = "") -> str:
    """Return the revision to go back to from ``update``, empty if there is none.

    This is the newest good one, unless another good one runs already: then somebody has gone back
    to it.
    """
    found = [one for one in good(revisions) if one != update and one in known]
    return running if running in found else next(iter(found), "")


def _held(status: Object, update: str) -> RolloutDecision:
    """Stop a rollout that is under way; only report one that is done."""
    if (status.get("revisions") or {}).get("current") == update:
        return RolloutDecision(update, action="Reported")
    return RolloutDecision(update, paused=True, action="Held")
