"""The assessment of a multi-node group, made of those of its pods. Pure.

A group has one incident of a kind, at its leader. A leak of a worker is the leader's suspicion, and
the worker's budget takes the place of its own for as long as that incident is open: what a restart
brought back is measured where the leak was.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.units import format_bytes

LEAKS = (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH)
"""What the leader tells for its group. Workers tell the rest themselves."""
MINE = ""
UNKNOWN = BudgetState()


def joined(
    own: Assessment, members: Mapping[str, Assessment | None], origins: Mapping[IncidentKind, str]
) -> Assessment:
    """Return what the leader knows of its group.

    ``members`` holds the assessments of the other pods, None for one that says nothing now.
    ``origins`` maps the kinds of open incidents to the pod that they began in, :data:`MINE` for the
    leader: until its end an incident follows that pod's memory.
    """
    found, warm = own, own.warm
    for kind in LEAKS:
        pod = origins.get(kind)
        if pod is None:
            pod = _worst(kind, own, members)
        theirs = own if pod == MINE else members.get(pod)
        suspicion = _suspicion(theirs, kind)
        if suspicion is not None:
            others = _others(kind, pod, own, members)
            suspicion = replace(suspicion, pod=pod or None, evidence=[*suspicion.evidence, *others])
        kept = [one for one in found.suspicions if one.kind is not kind]
        found = replace(found, suspicions=[*kept, *([suspicion] if suspicion else [])])
        if pod != MINE:
            found = _measured(found, kind, theirs)
            warm = warm and theirs is not None and theirs.warm
    return replace(found, warm=warm)


def _measured(own: Assessment, kind: IncidentKind, theirs: Assessment | None) -> Assessment:
    """``own`` with the budget of another pod; unknown where that says nothing."""
    if kind is IncidentKind.HOST_GROWTH:
        return replace(own, host=(theirs.host if theirs else None) or UNKNOWN)
    return replace(
        own,
        device=(theirs.device if theirs else None) or UNKNOWN,
        reserved=theirs.reserved if theirs else None,
    )


def _worst(kind: IncidentKind, own: Assessment, members: Mapping[str, Assessment | None]) -> str:
    """Return the pod with the worst suspicion, the leader if no pod has one."""
    worst, pod = _rank(_suspicion(own, kind)), MINE
    for name in sorted(members):
        rank = _rank(_suspicion(members[name], kind))
        if rank > worst:
            worst, pod = rank, name
    return pod


def _others(
    kind: IncidentKind, pod: str, own: Assessment, members: Mapping[str, Assessment | None]
) -> list[str]:
    """Name the other pods that leak too: their leaks join this one."""
    everyone = {"the leader": own if pod != MINE else None} | {
        f"pod {name}": members[name] for name in sorted(members) if name != pod
    }
    return [
        f"{name} grows too: {format_bytes(suspicion.bytes)}"
        for name, assessment in everyone.items()
        if (suspicion := _suspicion(assessment, kind)) is not None
    ]


def _suspicion(assessment: Assessment | None, kind: IncidentKind) -> Suspicion | None:
    found = [one for one in assessment.suspicions if one.kind is kind] if assessment else []
    return max(found, key=_rank, default=None)


def _rank(suspicion: Suspicion | None) -> tuple[bool, float, int]:
    if suspicion is None:
        return False, -1.0, 0
    return suspicion.over_budget, suspicion.consumed_ratio, suspicion.bytes
