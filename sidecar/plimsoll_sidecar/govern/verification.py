"""Judge the effect of a restart in the new epoch of the engine.

Two starts differ even without a leak, because of allocators, caches and the order of the first
requests. This difference, the noise, is learned from the engine's own starts, within bounds.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from plimsoll_api.admin import EngineState, Epoch
from plimsoll_api.assessment import Assessment, BudgetState, Segment
from plimsoll_api.incidents import GROWTH_INCIDENT_KINDS, IncidentKind
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.incident import ROUND_DURATION_S, Incident

# Memory may still decrease after the warm-up of the new epoch.
MEMORY_SETTLE_S = 60.0
# The warm-up is extra. Loading large weights takes minutes; a Deployment's default
# progressDeadlineSeconds is 600.
MAX_START_DURATION_S = 900.0
# A restart that frees this share of the growth resolves the incident.
MIN_CURED_SHARE = 0.9
# Below this share of the growth, the next rung is tried.
MIN_PARTLY_CURED_SHARE = 0.5


class Verdict(Enum):
    """Effect of a restart. ``USELESS`` includes an engine that did not become healthy."""

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
    """Compare the memory of the new epoch with the memory before the restart.

    The lowest memory since the restart counts, because the load may increase before the verdict. It
    is stored in ``incident``. The verdict is ``WAIT`` until it is known.
    """
    late = now - incident.phase_since > MAX_START_DURATION_S + warmup_s
    renewed = engine.epoch is not None and engine.epoch != incident.fenced_epoch
    if not renewed:
        return Verdict.USELESS if late else Verdict.WAIT
    budget = incident.get_budget_state(assessment)
    current = budget.current if budget else None
    if incident.kind in GROWTH_INCIDENT_KINDS:
        measured = assessment.warm and current is not None
        if incident.attribution.segment == Segment.SHARED_ORPHAN and not incident.missed_s:
            # Each new baseline includes the lost memory. Only the absence of a suspicion shows
            # that this memory was freed.
            measured = False
        if incident.baseline_bytes is not None and incident.before_bytes is not None:
            if not measured:
                return Verdict.USELESS if late else Verdict.WAIT
            unexplained = (current or 0) - ((budget and budget.explained) or 0)
            return _judge_by_bytes(incident, unexplained, _estimate_noise(incident, starts), now)
    healthy = engine.state is EngineState.SERVING and incident.missed_s >= ROUND_DURATION_S
    if healthy and (assessment.warm or incident.kind is IncidentKind.STALL):
        return Verdict.CURED
    return Verdict.USELESS if late else Verdict.WAIT


def _estimate_noise(incident: Incident, starts: StartHistory) -> float:
    # A restart of the worker alone, and an unknown baseline, count as free of noise.
    if incident.rung is Action.WORKER_RESTART or incident.baseline_bytes is None:
        return 0.0
    return starts.estimate_noise(incident.kind, incident.baseline_bytes)


def _judge_by_bytes(incident: Incident, unexplained: int, noise: float, now: float) -> Verdict:
    assert incident.before_bytes is not None and incident.baseline_bytes is not None  # noqa: PT018
    if incident.warm_at is None:
        incident.warm_at = now
    lowest_bytes = incident.least_bytes
    incident.least_bytes = unexplained if lowest_bytes is None else min(lowest_bytes, unexplained)
    growth = max(incident.before_bytes - incident.baseline_bytes, 1)
    returned = incident.before_bytes - incident.least_bytes
    incident.returned_bytes = max(returned, 0)
    if returned >= min(MIN_CURED_SHARE * growth, max(1, growth - noise)):
        return Verdict.CURED
    if now - incident.warm_at < MEMORY_SETTLE_S:
        return Verdict.WAIT
    return Verdict.PARTLY if returned >= MIN_PARTLY_CURED_SHARE * growth else Verdict.USELESS


# The noise is assumed until two starts have been observed. Measured with vLLM 0.32 and 2.75 GB, the
# memory of two starts differs by 1 %. The first two minutes of load add another 3.3 %.
PRIOR_NOISE_SHARE_OF_BASELINE = 0.04
# Two equal starts do not prove that there is no noise. If a start differs by more than the upper
# bound, the engine was changed or has leaked.
MIN_NOISE_SHARE_OF_BASELINE, MAX_NOISE_SHARE_OF_BASELINE = 0.01, 0.10
MAX_STORED_STARTS = 8
# The verification of a restart takes as long.
NUM_LEARNING_ASSESSMENTS = 60


class StartMemory(msgspec.Struct, frozen=True):
    """Baseline and lowest memory after one start, in bytes, without explained growth."""

    base: int
    least: int


class StartHistory(msgspec.Struct, omit_defaults=True):
    """The newest starts of the engine, oldest first.

    ``boot`` identifies the current start; None before the first. ``assessments`` counts its
    assessments.
    """

    host: list[StartMemory] = []
    device: list[StartMemory] = []
    boot: str | None = None
    assessments: int = msgspec.field(default=0, name="looks")
    current_host: StartMemory | None = msgspec.field(default=None, name="begun_host")
    current_device: StartMemory | None = msgspec.field(default=None, name="begun_device")

    def begin_start(self, epoch: str) -> None:
        """Observe a new start, unless ``epoch`` differs only in the engine's worker."""
        boot = get_process_epoch(epoch)
        if boot != self.boot:
            self.boot, self.assessments = boot, 0
            self.current_host = self.current_device = None

    def discard_start(self) -> None:
        """Exclude the current start, because the restart did not resolve its incident."""
        self.assessments = NUM_LEARNING_ASSESSMENTS

    def add_assessment(self, assessment: Assessment) -> bool:
        """Add an assessment, and report whether it completes the current start."""
        if self.boot is None or self.assessments >= NUM_LEARNING_ASSESSMENTS:
            return False
        if not assessment.warm:
            self.assessments, self.current_host, self.current_device = 0, None, None
            return False
        self.current_host = _update_lowest(self.current_host, assessment.host)
        self.current_device = _update_lowest(self.current_device, assessment.device)
        self.assessments += 1
        if self.assessments < NUM_LEARNING_ASSESSMENTS:
            return False
        self.host, self.device = (
            _append_start(self.host, self.current_host),
            _append_start(self.device, self.current_device),
        )
        return True

    def estimate_noise(self, kind: IncidentKind, base: int) -> float:
        """Return the bytes by which memory after a start may differ from the baseline ``base``.

        The estimate is the range of the n observed starts, times n / (n - 1), because few starts
        show less than the full range.
        """
        seen = self.host if kind is IncidentKind.HOST_GROWTH else self.device
        if len(seen) < 2:
            return PRIOR_NOISE_SHARE_OF_BASELINE * base
        observed_range = max(start.least for start in seen) - min(start.base for start in seen)
        learned = observed_range * len(seen) / (len(seen) - 1)
        return min(
            max(learned, MIN_NOISE_SHARE_OF_BASELINE * base), MAX_NOISE_SHARE_OF_BASELINE * base
        )


def get_process_epoch(epoch: str) -> str:
    """Return the part of ``epoch`` that a restart of the worker alone does not change."""
    try:
        return Epoch.parse(epoch).boot_id
    except ValueError:
        return epoch


def _update_lowest(previous: StartMemory | None, state: BudgetState | None) -> StartMemory | None:
    if state is None or state.current is None or state.baseline is None:
        return previous
    level = state.current - (state.explained or 0)
    if previous is None:
        return StartMemory(state.baseline, level)
    return StartMemory(previous.base, min(previous.least, level))


def _append_start(starts: list[StartMemory], start: StartMemory | None) -> list[StartMemory]:
    if start is None:
        return starts
    if starts and abs(start.base - starts[-1].base) > MAX_NOISE_SHARE_OF_BASELINE * starts[-1].base:
        return [start]
    return [*starts, start][-MAX_STORED_STARTS:]
