"""Did a restart help? The verdict on one incident after the engine's new epoch began."""

from __future__ import annotations

from enum import Enum, auto

from plimsoll_api.admin import EngineState
from plimsoll_sidecar.detect.assessment import Assessment, Kind
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.incident import Incident, budget_of
from plimsoll_sidecar.govern.state import (
    RETURNED_ENOUGH,
    RETURNED_SOME,
    ROUND,
    SETTLE_S,
    START_S,
)


class Verdict(Enum):
    WAIT = auto()
    CURED = auto()
    PARTLY = auto()
    USELESS = auto()


def verdict(
    incident: Incident, assessment: Assessment, engine: EngineView, warmup_s: float, now: float
) -> Verdict:
    """Judges the memory of the new epoch against the incident's own baseline.

    Keeps the least memory seen in ``incident``: load may come back before the verdict.
    """
    late = now - incident.phase_since > START_S + warmup_s
    renewed = engine.epoch is not None and engine.epoch != incident.fenced_epoch
    if not renewed:
        return Verdict.USELESS if late else Verdict.WAIT
    budget = budget_of(incident.kind, assessment)
    current = budget.current if budget else None
    if incident.kind in (Kind.HOST_GROWTH, Kind.DEVICE_GROWTH):
        measured = assessment.warm and current is not None
        if incident.baseline_bytes is not None and incident.before_bytes is not None:
            if not measured:
                return Verdict.USELESS if late else Verdict.WAIT
            return _by_bytes(incident, (current or 0) - ((budget and budget.explained) or 0), now)
    healthy = engine.state is EngineState.SERVING and incident.missed >= ROUND
    if healthy and (assessment.warm or incident.kind is Kind.STALL):
        return Verdict.CURED
    return Verdict.USELESS if late else Verdict.WAIT


def _by_bytes(incident: Incident, unexplained: int, now: float) -> Verdict:
    assert incident.before_bytes is not None and incident.baseline_bytes is not None  # noqa: PT018
    if incident.warm_at is None:
        incident.warm_at = now
    least = incident.least_bytes
    incident.least_bytes = unexplained if least is None else min(least, unexplained)
    growth = max(incident.before_bytes - incident.baseline_bytes, 1)
    returned = incident.before_bytes - incident.least_bytes
    incident.returned_bytes = max(returned, 0)
    if returned >= RETURNED_ENOUGH * growth:
        return Verdict.CURED
    if now - incident.warm_at < SETTLE_S:
        return Verdict.WAIT
    return Verdict.PARTLY if returned >= RETURNED_SOME * growth else Verdict.USELESS
