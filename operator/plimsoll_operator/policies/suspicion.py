"""Suspect revisions of a policy's workloads: one leak in most replicas of a revision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.fleet.revisions import suspect_status
from plimsoll_operator.fleet.suspects import ReplicaPod, find
from plimsoll_operator.kinds import Object
from plimsoll_operator.policies.selected_pod import SelectedPod, State
from plimsoll_operator.policies.workloads import Workload

MADE_IN_SETS = ("Deployment", "Rollout")
"""Kinds whose pods have the name of their ReplicaSet, which has a revision of its own."""


def suspects(
    workloads: Sequence[Workload], incidents: Sequence[Object], before: Mapping[str, Object]
) -> dict[WorkloadRef, Object]:
    """``suspectRevision`` by workload, for those that have one.

    ``before`` is what the last status says of each workload, by KIND/NAME: evidence ages, and a
    revision stays suspect as long as pods of it are there. Pods that nothing controls have no
    revision.
    """
    by_pod: dict[str, list[Object]] = {}
    for one in incidents:
        by_pod.setdefault(one["spec"]["pod"], []).append(one)
    found: dict[WorkloadRef, Object] = {}
    for workload in workloads:
        if workload.ref is None:
            continue
        pods = [_evidence(one) for one in workload.pods if one.state is not State.LEAVING]
        revisions = sorted({one.revision for one in pods} - {""})
        own = _own(workload, by_pod)
        known = before.get(str(workload.ref)) or {}
        suspected = [suspect for name in revisions if (suspect := find(name, pods, own))]
        first = min(suspected, key=lambda suspect: suspect.since, default=None)
        kept = (known.get("suspectRevision") or {}).get("revision")
        shown = suspect_status(first, known, kept if kept in revisions else "", "Reported", [])
        if shown:
            found[workload.ref] = shown
    return found


def _own(workload: Workload, by_pod: Mapping[str, list[Object]]) -> list[Object]:
    """Incidents of the workload's pods, and of pods of its ReplicaSets that are gone."""
    names = {one.name for one in workload.pods}
    sets = tuple({_prefix(one) for one in workload.pods if _in_set(one)})
    return [
        incident
        for pod, some in by_pod.items()
        if pod in names or (sets and pod.startswith(sets))
        for incident in some
    ]


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
