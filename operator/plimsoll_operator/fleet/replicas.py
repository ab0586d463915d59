"""List the replicas of a service or policy whose revision is known, and those that may leak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from plimsoll_api.incidents import ENDED_PHASES, GROWTH_INCIDENT_KINDS
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.kinds import Object


class Replica(NamedTuple):
    """Replica by pod name; ``workload`` is the pod's owner if a policy supervises it."""

    pod: str
    revision: str
    workload: str = ""


def list_pods_with_growth(incidents: Iterable[Object]) -> set[str]:
    """Return the names of the pods with an open growth incident."""
    return {
        str(incident["spec"]["pod"])
        for incident in incidents
        if incident["spec"]["kind"] in GROWTH_INCIDENT_KINDS
        and (incident.get("status") or {}).get("phase") not in ENDED_PHASES
    }


def list_service_replicas(pods: Iterable[PodView]) -> list[Replica]:
    """Return the replicas of an InferenceService whose revision is known."""
    return [Replica(pod.name, pod.revision) for pod in pods if pod.revision]


def list_policy_replicas(pods: Iterable[SelectedPod]) -> list[Replica]:
    """Return the supervised replicas of a policy whose workload and revision are known.

    Pods of multi-node groups are excluded, because their roles differ.
    """
    return [
        Replica(one.name, one.member.revision, str(one.member.workload))
        for one in pods
        if one.state is SupervisionState.SUPERVISED
        and one.member.workload is not None
        and one.member.revision
        and not one.member.group
    ]
