"""Judge a restart after the start of the engine's new epoch.

A restart is judged by the memory that the next start needs, compared with the one before. Starts
differ without any leak, because of allocators, caches and the order of the first requests. The
engine's own starts show by how much, within bounds. The journal stores them.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from plimsoll_api.admin import EngineState, Epoch
from plimsoll_api.assessment import Assessment, BudgetState, Segment
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.incident import ROUND_S, Incident

MEMORY_SETTLE_S = 60.0
"""Seconds after the new epoch's warm-up during which memory may still fall."""
MAX_START_S = 900.0
"""Longest start of an engine in seconds, to which the warm-up is added.

Loading large weights takes minutes. 600 s is Kubernetes' default for a Deployment's progress
deadline.
"""
CURED_SHARE = 0.9
"""Share of the growth that a remediation must free to count as a cure."""
PARTLY_CURED_SHARE = 0.5
"""Share of the growth below which the next rung is tried."""


class Verdict(Enum):
    """Effect of a restart.

    ``PARTLY`` means that some memory was freed. ``USELESS`` means that too little was freed, or
    that no engine was healthy.
    """

    WAIT = auto()
    CURED = auto()
    PARTLY = auto()
    USELESS = auto()


def judge_restart(
    incident: Incident,
    assessment: Assessment,
    engine: EngineView,
    starts: StartHistory,
    warmup_s: float,
    now: float,
) -> Verdict:
    """Compare the memory of the new epoch with the incident's baseline, and return the verdict.

    The minimum memory is stored in ``incident``, because the load may increase again before the
    verdict.
    """
    late = now - incident.phase_since > MAX_START_S + warmup_s
    renewed = engine.epoch is not None and engine.epoch != incident.fenced_epoch
    if not renewed:
        return Verdict.USELESS if late else Verdict.WAIT
    budget = incident.budget(assessment)
    current = budget.current if budget else None
    if incident.kind in (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH):
        measured = assessment.warm and current is not None
        if incident.attribution.segment == Segment.SHARED_ORPHAN and not incident.missed_s:
            # Each new baseline includes the lost memory. Only a missing suspicion proves that it is
            # gone.
            measured = False
        if incident.baseline_bytes is not None and incident.before_bytes is not None:
            if not measured:
                return Verdict.USELESS if late else Verdict.WAIT
            unexplained = (current or 0) - ((budget and budget.explained) or 0)
            return _judge_by_bytes(incident, unexplained, _estimate_noise(incident, starts), now)
    healthy = engine.state is EngineState.SERVING and incident.missed_s >= ROUND_S
    if healthy and (assessment.warm or incident.kind is IncidentKind.STALL):
        return Verdict.CURED
    return Verdict.USELESS if late else Verdict.WAIT


def _estimate_noise(incident: Incident, starts: StartHistory) -> float:
    """Return the bytes by which two starts of the same engine may differ.

    A new worker with the same frontend differs by less.
    """
    if incident.rung is Action.WORKER_RESTART or incident.baseline_bytes is None:
        return 0.0
    return starts.estimate_noise(incident.kind, incident.baseline_bytes)


def _judge_by_bytes(incident: Incident, unexplained: int, noise: float, now: float) -> Verdict:
    assert incident.before_bytes is not None and incident.baseline_bytes is not None  # noqa: PT018
    if incident.warm_at is None:
        incident.warm_at = now
    least = incident.least_bytes
    incident.least_bytes = unexplained if least is None else min(least, unexplained)
    growth = max(incident.before_bytes - incident.baseline_bytes, 1)
    returned = incident.before_bytes - incident.least_bytes
    incident.returned_bytes = max(returned, 0)
    if returned >= min(CURED_SHARE * growth, max(1, growth - noise)):
        return Verdict.CURED
    if now - incident.warm_at < MEMORY_SETTLE_S:
        return Verdict.WAIT
    return Verdict.PARTLY if returned >= PARTLY_CURED_SHARE * growth else Verdict.USELESS


PRIOR_NOISE_SHARE = 0.04
"""Noise as a share of an engine's memory, until two of its starts were seen.

Measured on vLLM 0.32 with 2.75 GB: two starts differ by 1 %, and by 3.3 % more in the first two
minutes of load.
"""
MIN_SHARE, MAX_SHARE = 0.01, 0.10
"""Bounds of the learned noise, as shares of memory.

Two equal starts prove little. A start that differs by more than the upper bound is another engine,
or one that has leaked.
"""
MAX_STARTS = 8
LEARNING_ASSESSMENTS = 60
"""Number of assessments after the warm-up from which the minimum memory is taken.

Verification uses as many.
"""


class StartMemory(msgspec.Struct, frozen=True):
    """Memory of one start in bytes.

    ``base`` is the baseline, and ``least`` the minimum of unexplained memory after the warm-up.
    """

    base: int
    least: int


class StartHistory(msgspec.Struct, omit_defaults=True):
    """The newest starts, oldest first.

    ``boot`` identifies the current start, or is None. The start is added after
    :data:`LEARNING_ASSESSMENTS`, which ``assessments`` counts.
    """

    host: list[StartMemory] = []
    device: list[StartMemory] = []
    boot: str | None = None
    assessments: int = msgspec.field(default=0, name="looks")
    current_host: StartMemory | None = msgspec.field(default=None, name="begun_host")
    current_device: StartMemory | None = msgspec.field(default=None, name="begun_device")

    def begin_start(self, epoch: str) -> None:
        """Start to observe ``epoch``, unless it is a new worker of the same engine."""
        boot = get_process_part(epoch)
        if boot != self.boot:
            self.boot, self.assessments = boot, 0
            self.current_host = self.current_device = None

    def discard_start(self) -> None:
        """Discard the current start, because it did not free the memory that it should have."""
        self.assessments = LEARNING_ASSESSMENTS

    def add_assessment(self, assessment: Assessment) -> bool:
        """Add an assessment of the current start. Return whether it completed the start."""
        if self.boot is None or self.assessments >= LEARNING_ASSESSMENTS:
            return False
        if not assessment.warm:
            self.assessments, self.current_host, self.current_device = 0, None, None
            return False
        self.current_host = _choose_lower(self.current_host, assessment.host)
        self.current_device = _choose_lower(self.current_device, assessment.device)
        self.assessments += 1
        if self.assessments < LEARNING_ASSESSMENTS:
            return False
        self.host, self.device = (
            _append_start(self.host, self.current_host),
            _append_start(self.device, self.current_device),
        )
        return True

    def estimate_noise(self, kind: IncidentKind, base: int) -> float:
        """Return the bytes by which a start may differ from one with ``base`` bytes.

        Few starts show less than the full variation. The range of two starts therefore counts
        double, and that of many little more than once.
        """
        seen = self.host if kind is IncidentKind.HOST_GROWTH else self.device
        if len(seen) < 2:
            return PRIOR_NOISE_SHARE * base
        differ = max(one.least for one in seen) - min(one.base for one in seen)
        learned = differ * len(seen) / (len(seen) - 1)
        return min(max(learned, MIN_SHARE * base), MAX_SHARE * base)


def get_process_part(epoch: str) -> str:
    """Return the part of ``epoch`` that all workers of one engine process share."""
    try:
        return Epoch.parse(epoch).boot_id
    except ValueError:
        return epoch


def _choose_lower(before: StartMemory | None, state: BudgetState | None) -> StartMemory | None:
    if state is None or state.current is None or state.baseline is None:
        return before
    level = state.current - (state.explained or 0)
    if before is None:
        return StartMemory(state.baseline, level)
    return StartMemory(before.base, min(before.least, level))


def _append_start(starts: list[StartMemory], start: StartMemory | None) -> list[StartMemory]:
    if start is None:
        return starts
    if starts and abs(start.base - starts[-1].base) > MAX_SHARE * starts[-1].base:
        return [start]
    return [*starts, start][-MAX_STARTS:]
