"""Assess a multi-node group as a whole, and add what the cluster knows of its devices.

A group has at most one incident of each kind, which belongs to its leader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.incidents import GROWTH_INCIDENT_KINDS, IncidentKind
from plimsoll_api.units import format_bytes

DEVICE_KINDS = frozenset({IncidentKind.DEVICE_GROWTH, IncidentKind.STALL})
"""Kinds of incidents that an unhealthy device may explain."""
LEADER_PLACEHOLDER = ""
"""Placeholder for the name of the leader's pod."""
UNKNOWN_BUDGET, UNKNOWN_ASSESSMENT = BudgetState(), Assessment(0.0, 0, False)
RELEASED_BUDGET = BudgetState(current=0)
"""State of a budget in a pod that no longer exists: its memory was released with it."""


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
    gone: Collection[str] = (),
) -> Assessment:
    """Return the leader's assessment of its multi-node group.

    ``members`` holds the assessments of the other pods by name; None if a pod does not report.
    ``origins`` maps the kind of each open incident to the pod that leaked
    (:data:`LEADER_PLACEHOLDER` for the leader), in which growth is measured until the incident
    ends. ``gone`` holds the pods of ``origins`` that no longer exist. Their incidents can end, so
    that growth in another pod can open an incident of its own.
    """
    existing = {name: members[name] for name in sorted(members) if name not in gone}
    pods = {LEADER_PLACEHOLDER: own_assessment} | existing
    result, warm = own_assessment, own_assessment.warm
    for kind in GROWTH_INCIDENT_KINDS:
        found = {name: worst for name, one in pods.items() if (worst := _find_worst(one, kind))}
        pod = origins.get(kind)
        if pod is None:
            pod = max(found, key=lambda name: _rank(found[name]), default=LEADER_PLACEHOLDER)
        suspicions = [other for other in result.suspicions if other.kind is not kind]
        if pod in found:
            others = [
                f"the memory of {f'pod {name}' if name else 'the leader'} also grows: by "
                + format_bytes(one.bytes)
                for name, one in found.items()
                if name != pod
            ]
            worst = found[pod]
            suspicions.append(replace(worst, pod=pod or None, evidence=[*worst.evidence, *others]))
        result = replace(result, suspicions=suspicions)
        if pod != LEADER_PLACEHOLDER:
            reported = pods.get(pod) or UNKNOWN_ASSESSMENT
            if pod in gone:
                reported = Assessment(
                    own_assessment.t,
                    own_assessment.epoch,
                    warm=True,
                    host=RELEASED_BUDGET,
                    device=RELEASED_BUDGET,
                )
            warm = warm and reported.warm
            if kind is IncidentKind.HOST_GROWTH:
                result = replace(result, host=reported.host or UNKNOWN_BUDGET)
            else:
                device = reported.device or UNKNOWN_BUDGET
                result = replace(result, device=device, reserved=reported.reserved)
    return replace(result, warm=warm)


def _find_worst(assessment: Assessment | None, kind: IncidentKind) -> Suspicion | None:
    suspicions = assessment.suspicions if assessment else []
    return max((one for one in suspicions if one.kind is kind), key=_rank, default=None)


def _rank(suspicion: Suspicion) -> tuple[bool, float, int]:
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes
