"""Assess a multi-node group as a whole, and add what the cluster knows of its devices.

A group has at most one incident of each kind, which belongs to its leader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.incidents import GROWTH_INCIDENT_KINDS, IncidentKind
from plimsoll_api.units import format_bytes

DEVICE_KINDS = frozenset({IncidentKind.DEVICE_GROWTH, IncidentKind.STALL})
"""Kinds of incidents that an unhealthy device may explain."""
LEADER_PLACEHOLDER = ""
"""Placeholder for the name of the leader's pod."""
UNKNOWN_BUDGET, UNKNOWN_ASSESSMENT = BudgetState(), Assessment(0.0, 0, False)


def add_device_health(assessment: Assessment, unhealthy: Sequence[str]) -> Assessment:
    """Return ``assessment`` with the ``unhealthy`` devices of the pod as evidence."""
    if not unhealthy:
        return assessment
    reported = f"the kubelet reports an unhealthy device: {', '.join(unhealthy)}"
    return replace(
        assessment,
        suspicions=[
            replace(one, unhealthy_device=unhealthy[0], evidence=[reported, *one.evidence])
            if one.kind in DEVICE_KINDS
            else one
            for one in assessment.suspicions
        ],
    )


def combine_group(
    own_assessment: Assessment,
    members: Mapping[str, Assessment | None],
    origins: Mapping[IncidentKind, str],
) -> Assessment:
    """Return the leader's assessment of its multi-node group.

    ``members`` holds the assessments of the other pods by name; None if a pod does not report.
    ``origins`` maps the kind of each open incident to the pod that leaked
    (:data:`LEADER_PLACEHOLDER` for the leader), in which growth is measured until the incident
    ends.
    """
    result, warm = own_assessment, own_assessment.warm
    for kind in GROWTH_INCIDENT_KINDS:
        pod = origins.get(kind)
        if pod is None:
            pod = _find_worst_pod(kind, own_assessment, members)
        reported = own_assessment if pod == LEADER_PLACEHOLDER else members.get(pod)
        suspicion = _find_suspicion(reported, kind)
        if suspicion is not None:
            others = _describe_other_leaks(kind, pod, own_assessment, members)
            suspicion = replace(suspicion, pod=pod or None, evidence=[*suspicion.evidence, *others])
        kept = [other for other in result.suspicions if other.kind is not kind]
        result = replace(result, suspicions=[*kept, *([suspicion] if suspicion else [])])
        if pod != LEADER_PLACEHOLDER:
            result = _replace_budget(result, kind, reported)
            warm = warm and reported is not None and reported.warm
    return replace(result, warm=warm)


def _replace_budget(
    own_assessment: Assessment, kind: IncidentKind, reported: Assessment | None
) -> Assessment:
    reported = reported or UNKNOWN_ASSESSMENT
    if kind is IncidentKind.HOST_GROWTH:
        return replace(own_assessment, host=reported.host or UNKNOWN_BUDGET)
    device = reported.device or UNKNOWN_BUDGET
    return replace(own_assessment, device=device, reserved=reported.reserved)


def _find_worst_pod(
    kind: IncidentKind, own_assessment: Assessment, members: Mapping[str, Assessment | None]
) -> str:
    worst, pod = _rank_suspicion(_find_suspicion(own_assessment, kind)), LEADER_PLACEHOLDER
    for name in sorted(members):
        rank = _rank_suspicion(_find_suspicion(members[name], kind))
        if rank > worst:
            worst, pod = rank, name
    return pod


def _describe_other_leaks(
    kind: IncidentKind,
    pod: str,
    own_assessment: Assessment,
    members: Mapping[str, Assessment | None],
) -> list[str]:
    others = {"the leader": own_assessment if pod != LEADER_PLACEHOLDER else None} | {
        f"pod {name}": members[name] for name in sorted(members) if name != pod
    }
    return [
        f"the memory of {name} also grows: by {format_bytes(suspicion.bytes)}"
        for name, assessment in others.items()
        if (suspicion := _find_suspicion(assessment, kind)) is not None
    ]


def _find_suspicion(assessment: Assessment | None, kind: IncidentKind) -> Suspicion | None:
    suspicions = assessment.suspicions if assessment else []
    return max(
        (each for each in suspicions if each.kind is kind), key=_rank_suspicion, default=None
    )


def _rank_suspicion(suspicion: Suspicion | None) -> tuple[bool, float, int]:
    if suspicion is None:
        return False, -1.0, 0
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes
