"""Did a restart help? The verdict on one incident after the engine's new epoch began."""

from __future__ import annotations

from enum import Enum, auto

from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Assessment, Segment
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.starts import Starts
from plimsoll_sidecar.govern.state import (
    RETURNED_ENOUGH,
    RETURNED_SOME,
    ROUND,
    SETTLE_S,
    START_S,
)


class Verdict(Enum):
    """What a restart achieved.

    ``PARTLY``: some memory came back; ``USELESS``: too little, or no healthy engine in time.
    """

    WAIT = auto()
    CURED = auto()
    PARTLY = auto()
    USELESS = auto()


def verdict(
    incident: Incident,
    assessment: Assessment,
    engine: EngineView,
    starts: Starts,
    warmup_s: float,
    now: float,
) -> Verdict:
    """Judges the memory of the new epoch against the incident's own baseline.

    Keeps the least memory seen in ``incident``: load may come back before the verdict.
    """
    late = now - incident.phase_since > START_S + warmup_s
    renewed = engine.epoch is not None and engine.epoch != incident.fenced_epoch
    if not renewed:
        return Verdict.USELESS if late else Verdict.WAIT
    budget = incident.budget(assessment)
    current = budget.current if budget else None
    if incident.kind in (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH):
        measured = assessment.warm and current is not None
        if incident.attribution.segment == Segment.SHARED_ORPHAN and not incident.missed:
            measured = False  # it is part of each new baseline: gone is what nobody suspects
        if incident.baseline_bytes is not None and incident.before_bytes is not None:
            if not measured:
                return Verdict.USELESS if late else Verdict.WAIT
            unexplained = (current or 0) - ((budget and budget.explained) or 0)
            return _by_bytes(incident, unexplained, _noise(incident, starts), now)
    healthy = engine.state is EngineState.SERVING and incident.missed >= ROUND
    if healthy and (assessment.warm or incident.kind is IncidentKind.STALL):
        return Verdict.CURED
    return Verdict.USELESS if late else Verdict.WAIT


def _noise(incident: Incident, starts: Starts) -> float:
    """By how much two starts of the same engine may differ, in bytes.

    A new worker beside the same frontend is compared with itself, and differs by less.
    """
    if incident.rung is Action.WORKER_RESTART or incident.baseline_bytes is None:
        return 0.0
    return starts.noise(incident.kind, incident.baseline_bytes)


def _by_bytes(incident: Incident, unexplained: int, noise: float, now: float) -> Verdict:
    assert incident.before_bytes is not None and incident.baseline_bytes is not None  # noqa: PT018
    if incident.warm_at is None:
        incident.warm_at = now
    least = incident.least_bytes
    incident.least_bytes = unexplained if least is None else min(least, unexplained)
    growth = max(incident.before_bytes - incident.baseline_bytes, 1)
    returned = incident.before_bytes - incident.least_bytes
    incident.returned_bytes = max(returned, 0)
    if returned >= min(RETURNED_ENOUGH * growth, max(1, growth - noise)):
        return Verdict.CURED
    if now - incident.warm_at < SETTLE_S:
        return Verdict.WAIT
    return Verdict.PARTLY if returned >= RETURNED_SOME * growth else Verdict.USELESS
