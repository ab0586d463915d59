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
