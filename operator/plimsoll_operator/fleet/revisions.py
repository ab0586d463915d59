"""Find suspect revisions, and decide which revision to run and which one to roll back to.

A revision is suspect if most of its replicas, and at least two, have the same leak.
``status.revisions`` stores the history: ``update`` is the revision of the spec, ``current`` the
last one that was rolled out completely, and ``good`` the revisions to roll back to,
newest first. A revision becomes good once all replicas run it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll_api.incidents import ENDED_PHASES
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.operation import OnLeak, RunRevision
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.workloads import Workload
from plimsoll_operator.kinds import Object

LEAK_INCIDENT_KINDS = frozenset({"HostGrowth", "DeviceGrowth", "CapacityLoss", "OutOfMemoryKill"})
MIN_LEAKING_REPLICAS = 2
"""Minimum number of leaking replicas of a suspect revision."""

MAX_CHANGED_PATHS = 16
REPLICA_SET_KINDS = ("Deployment", "Rollout")
"""Kinds whose pods are named after their ReplicaSet, which has its own revision."""


@dataclass(frozen=True)
class LeakingRevision:
    """Revision that leaks in most of its replicas, from ``since`` on (RFC 3339)."""

    revision: str
    leak: str
    since: str
    leaking: int
    replicas: int
    """Number of current replicas, plus the leaking replicas whose pod is deleted or unknown."""


class ReplicaPod(NamedTuple):
    """Pod as evidence for or against its revision.

    ``created`` (RFC 3339) distinguishes pods that reuse a name; otherwise, it is empty.
    """

    pod: str
    revision: str
    replica: str
    in_replica_set: bool = True
    created: str = ""


def make_replica_pods(pods: Iterable[PodView]) -> list[ReplicaPod]:
    """Convert the pods of an InferenceService to evidence."""
    return [
        ReplicaPod(pod.name, pod.revision, pod.group, in_replica_set=False, created=pod.created)
        if pod.group
        else ReplicaPod(pod.name, pod.revision, pod.name)
        for pod in pods
    ]


def find_suspect_revision(
    revision: str,
    pods: list[ReplicaPod],
    incidents: Sequence[Object],
    min_leaking: int = MIN_LEAKING_REPLICAS,
) -> LeakingRevision | None:
    """Return the earliest leak that most replicas of ``revision`` have; None if there is none."""
    replicas = {pod.replica for pod in pods if pod.revision == revision}
    first: dict[str, dict[str, str]] = defaultdict(dict)
    for incident, replica in _iterate_leaks(revision, pods, incidents):
        if _is_confirmed(incident):
            opened_at, opened = first[_format_leak(incident)], incident["spec"]["openedAt"]
            opened_at[replica] = min(opened_at.get(replica, opened), opened)
    needed = max(min_leaking, len(replicas) // 2 + 1)
    suspects = [
        LeakingRevision(
            revision,
            leak,
            sorted(leaking.values())[needed - 1],
            len(leaking),
            len(replicas | leaking.keys()),
        )
        for leak, leaking in first.items()
        if len(leaking) >= needed
    ]
    return min(suspects, key=lambda one: (one.since, one.leak), default=None)


def list_suspected_pods(
    revision: str, pods: list[ReplicaPod], incidents: Sequence[Object]
) -> list[str]:
    """Return the names of the pods of ``revision`` with a confirmed or suspected leak, sorted."""
    return sorted(
        {
            str(incident["spec"]["pod"])
            for incident, _ in _iterate_leaks(revision, pods, incidents)
            if _is_confirmed(incident)
            or (incident.get("status") or {}).get("phase") not in ENDED_PHASES
        }
    )


def _iterate_leaks(
    revision: str, pods: list[ReplicaPod], incidents: Sequence[Object]
) -> Iterator[tuple[Object, str]]:
    """Yield each leak incident in a pod of ``revision``, with the name of the pod's replica."""
    present = {pod.pod: pod for pod in pods}
    of_sets = {_get_replica_set_name(pod.pod): pod.revision for pod in pods if pod.in_replica_set}
    for incident in incidents:
        spec = incident["spec"]
        if spec["kind"] not in LEAK_INCIDENT_KINDS:
            continue
        pod = present.get(spec["pod"])
        if pod is not None and incident["metadata"].get("creationTimestamp", "") < pod.created:
            continue  # it is about an earlier pod of this name, with an unknown revision
        if (pod.revision if pod else of_sets.get(_get_replica_set_name(spec["pod"]))) == revision:
            yield incident, pod.replica if pod else spec["pod"]


def describe_same_leak(leak: str, leaking: int, replicas: int, revision: str, since: str) -> str:
    """Return a message that says why a revision is suspect."""
    return f"{leak} in {leaking} of {replicas} replicas of revision {revision} since {since}"


def make_suspect_status(
    suspect: LeakingRevision | None, previous: Object, update: str, action: str, changed: list[str]
) -> dict[str, Any] | None:
    """Return ``status.suspectRevision``, or None. A suspect ``update`` remains suspect."""
    last: dict[str, Any] | None = previous.get("suspectRevision")
    if suspect is None:
        return last | {"action": action} if last and last.get("revision") == update else None
    return {
        "revision": suspect.revision,
        "leak": suspect.leak,
        "since": suspect.since,
        "leakingReplicas": suspect.leaking,
        "replicas": suspect.replicas,
        "action": action,
        "changed": changed,
    }


def diff_templates(old_template: Any, new_template: Any, path: str = "") -> list[str]:
    """Return the paths at which two pod templates differ, at most :data:`MAX_CHANGED_PATHS`."""
    if isinstance(old_template, dict) and isinstance(new_template, dict):
        keys = sorted(old_template.keys() | new_template.keys())
        parts = (
            diff_templates(old_template.get(k), new_template.get(k), f"{path}.{k}") for k in keys
        )
        return [one for part in parts for one in part][:MAX_CHANGED_PATHS]
    if _has_named_items(old_template) and _has_named_items(new_template):
        old, new = ({one["name"]: one for one in items} for items in (old_template, new_template))
        keys = sorted(old.keys() | new.keys())
        parts = (diff_templates(old.get(k), new.get(k), f"{path}[{k}]") for k in keys)
        return [one for part in parts for one in part][:MAX_CHANGED_PATHS]
    if old_template == new_template:
        return []
    return [
        f"{path.removeprefix('.')}: {_format_value(old_template)} -> {_format_value(new_template)}"
    ]


def _has_named_items(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(i, dict) and "name" in i for i in items)


def _format_value(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_confirmed(incident: Object) -> bool:
    status = incident.get("status") or {}
    return status.get("phase") not in (None, "Open") and status.get("outcome") != "Cleared"


def _format_leak(incident: Object) -> str:
    attribution = (incident.get("status") or {}).get("attribution") or {}
    segment = attribution.get("segment")
    kind = str(incident["spec"]["kind"])
    return f"{kind} in {segment}" if segment else kind


def _get_replica_set_name(pod: str) -> str:
    return pod.rpartition("-")[0]


def make_workload_evidence(workload: Workload) -> list[tuple[str, ReplicaPod]]:
    """Return creation time (RFC 3339) and evidence of each pod that is not terminating."""
    active = [pod for pod in workload.pods if pod.state is not SupervisionState.LEAVING]
    return [(pod.created, _make_evidence(pod)) for pod in active]


def find_suspect_workloads(
    workloads: Sequence[Workload], incidents: Sequence[Object], previous: Mapping[str, Object]
) -> dict[WorkloadRef, Object]:
    """Return ``suspectRevision`` of each workload that has a suspect revision.

    ``previous`` maps KIND/NAME to the workload's last status. A revision remains suspect while it
    has pods.
    """
    owned = group_incidents_by_workload(workloads, incidents)
    suspects: dict[WorkloadRef, Object] = {}
    for workload in workloads:
        if workload.ref is None:
            continue
        last, own = previous.get(str(workload.ref)) or {}, owned.get(workload.ref, [])
        if not own and "suspectRevision" not in last:
            continue
        pods = [one for _, one in make_workload_evidence(workload)]
        revisions = sorted({one.revision for one in pods} - {""})
        suspected = [
            suspect for name in revisions if (suspect := find_suspect_revision(name, pods, own))
        ]
        first = min(suspected, key=lambda suspect: suspect.since, default=None)
        kept = (last.get("suspectRevision") or {}).get("revision")
        shown = make_suspect_status(first, last, kept if kept in revisions else "", "Reported", [])
        if shown:
            suspects[workload.ref] = shown
    return suspects


def group_incidents_by_workload(
    workloads: Sequence[Workload], incidents: Sequence[Object]
) -> dict[WorkloadRef | None, list[Object]]:
    """Return the incidents of each workload, including those of its deleted pods."""
    owners = {pod.name: one.ref for one in workloads for pod in one.pods}
    by_workload: dict[WorkloadRef | None, list[Object]] = defaultdict(list)
    of_deleted: dict[str, list[Object]] = {}
    for incident in incidents:
        pod = incident["spec"]["pod"]
        if pod in owners:
            by_workload[owners[pod]].append(incident)
        else:
            of_deleted.setdefault(pod, []).append(incident)
    for workload in workloads:
        by_workload[workload.ref] += _find_incidents_of_replica_sets(workload, of_deleted)
    return by_workload


def _find_incidents_of_replica_sets(
    workload: Workload, incidents_of_deleted: Mapping[str, list[Object]]
) -> list[Object]:
    if not incidents_of_deleted:
        return []
    sets = tuple({_get_name_prefix(one) for one in workload.pods if _is_named_by_revision(one)})
    return [
        one for pod, some in incidents_of_deleted.items() if pod.startswith(sets) for one in some
    ]


def _make_evidence(pod: SelectedPod) -> ReplicaPod:
    member = pod.member
    return ReplicaPod(
        pod.name,
        member.revision,
        member.get_replica_name(pod.name),
        _is_named_by_revision(pod),
        pod.created,
    )


def _get_name_prefix(pod: SelectedPod) -> str:
    name = pod.member.workload.name if pod.member.workload else ""
    return f"{name}-{pod.member.revision}-"


# Kubernetes may truncate the revision in a pod's name.
def _is_named_by_revision(pod: SelectedPod) -> bool:
    ref = pod.member.workload
    return (
        ref is not None
        and ref.kind in REPLICA_SET_KINDS
        and pod.name.startswith(_get_name_prefix(pod))
    )


@dataclass(frozen=True)
class RolloutDecision:
    """Decision about a rollout; ``requested`` is True if a person requested a rollback."""

    revision: str
    paused: bool = False
    action: str = "None"
    requested: bool = False


MAX_GOOD_REVISIONS = 2
"""Maximum number of good revisions: that of the spec, and another for a rollback."""


def make_revisions_status(
    revisions: Object, update: str, rolled_out: str, bad_revision: str
) -> Object:
    """Return the new ``status.revisions``.

    ``rolled_out`` is the revision that all replicas run. ``bad_revision`` is one that leaks or that
    someone rolled back. Both may be empty.
    """
    candidates = dict.fromkeys([rolled_out, *list_good_revisions(revisions)])
    kept = [revision for revision in candidates if revision not in ("", bad_revision)][
        :MAX_GOOD_REVISIONS
    ]
    current = rolled_out or revisions.get("current", "")
    previous = next((revision for revision in kept if revision != current), "")
    named = {"update": update, "current": current, "previous": previous}
    return {key: value for key, value in named.items() if value} | {"good": kept}


def list_good_revisions(revisions: Object) -> list[str]:
    """Return the good revisions, newest first."""
    if "good" in revisions:
        return list(revisions["good"])
    return [revisions[name] for name in ("current", "previous") if revisions.get(name)]


def decide_rollout(
    service: InferenceService,
    status: Object,
    update: str,
    suspect: LeakingRevision | None,
    stored_revisions: Collection[str],
    running: str = "",
) -> RolloutDecision:
    """Decide which revision to run.

    ``stored_revisions`` have a stored template, and ``running`` is the current workload's. A
    rollback continues until the spec changes.
    """
    target = find_rollback_revision(
        status.get("revisions") or {}, update, stored_revisions, running
    )
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
            return _pause_rollout(status, update)
        case OnLeak.ROLLBACK:
            if target:
                return RolloutDecision(target, action="RolledBack")
            return _pause_rollout(status, update)


def find_rollback_revision(
    revisions: Object, update: str, stored_revisions: Collection[str], running: str = ""
) -> str:
    """Return the revision to roll back to if ``update`` is bad; empty if there is none.

    Prefer ``running`` if it is good, then the newest good revision in ``stored_revisions``.
    """
    usable = [
        name
        for name in list_good_revisions(revisions)
        if name != update and name in stored_revisions
    ]
    return running if running in usable else next(iter(usable), "")


def _pause_rollout(status: Object, update: str) -> RolloutDecision:
    """Pause a rollout in progress; otherwise, only report the suspect."""
    if (status.get("revisions") or {}).get("current") == update:
        return RolloutDecision(update, action="Reported")
    return RolloutDecision(update, paused=True, action="Held")
