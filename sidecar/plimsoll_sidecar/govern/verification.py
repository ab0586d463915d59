"""Did a restart help? The verdict on one incident after the engine's new epoch began.

A restart is judged by what memory the next start needs, against what the one before needed. That
differs without any leak: allocators, caches and the order of the first requests. By how much is
learned here from the engine's own starts, within bounds, as the journal remembers it.
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

SETTLE_S = 60.0
"""Time after the new epoch's warm-up in which memory may still come down."""
START_S = 900.0
"""Longest start of an engine, to which the warm-up is added: loading large weights takes minutes
(Kubernetes' own default for a Deployment's progress deadline is 600 s)."""
RETURNED_ENOUGH = 0.9
"""Share of the growth that a remediation must return to count as a cure."""
RETURNED_SOME = 0.5
"""Below this share the next rung is tried."""


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
        if incident.attribution.segment == Segment.SHARED_ORPHAN and not incident.missed_s:
            measured = False  # it is part of each new baseline: gone is what nobody suspects
        if incident.baseline_bytes is not None and incident.before_bytes is not None:
            if not measured:
                return Verdict.USELESS if late else Verdict.WAIT
            unexplained = (current or 0) - ((budget and budget.explained) or 0)
            return _by_bytes(incident, unexplained, _noise(incident, starts), now)
    healthy = engine.state is EngineState.SERVING and incident.missed_s >= ROUND_S
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


PRIOR_SHARE = 0.04
"""Of an engine's memory, until two of its starts were seen. Measured on vLLM 0.32 with 2.75 GB: two
starts differ by 1 %, and by 3.3 % more in the first two minutes of load."""
MIN_SHARE, MAX_SHARE = 0.01, 0.10
"""Bounds of what is learned. Two starts that happen to be equal prove little, and a start that
differs by more than the upper bound is another engine, or one that has leaked."""
KEPT = 8
LOOKS = 60
"""Assessments after the warm-up in which the least memory is looked for, as verification does."""


class Start(msgspec.Struct, frozen=True):
    """One start's memory in bytes.

    The baseline, and the least that was seen after the warm-up, without what the ledger explains.
    """

    base: int
    least: int


class Starts(msgspec.Struct, omit_defaults=True):
    """The newest starts, oldest first.

    ``boot`` names the one under way, which is not among them before its ``looks`` are done; null
    where none is.
    """

    host: list[Start] = []
    device: list[Start] = []
    boot: str | None = None
    looks: int = 0
    begun_host: Start | None = None
    begun_device: Start | None = None

    def begin(self, epoch: str) -> None:
        """Note that ``epoch`` began. A new worker of the same engine is no start of the engine."""
        boot = boot_of(epoch)
        if boot != self.boot:
            self.boot, self.looks = boot, 0
            self.begun_host = self.begun_device = None

    def forget(self) -> None:
        """Learn nothing from the start under way: it did not bring back what it should have."""
        self.looks = LOOKS

    def look(self, assessment: Assessment) -> bool:
        """Take in one assessment of the start under way; true when it has been learned from."""
        if self.boot is None or self.looks >= LOOKS:
            return False
        if not assessment.warm:
            self.looks, self.begun_host, self.begun_device = 0, None, None
            return False
        self.begun_host = _lower(self.begun_host, assessment.host)
        self.begun_device = _lower(self.begun_device, assessment.device)
        self.looks += 1
        if self.looks < LOOKS:
            return False
        self.host, self.device = (
            _with(self.host, self.begun_host),
            _with(self.device, self.begun_device),
        )
        return True

    def noise(self, kind: IncidentKind, base: int) -> float:
        """Return by how many bytes a start may differ from one that had ``base`` bytes.

        The range of a few starts is below what many would show, so that it counts double with two
        of them and hardly more than once with many.
        """
        seen = self.host if kind is IncidentKind.HOST_GROWTH else self.device
        if len(seen) < 2:
            return PRIOR_SHARE * base
        differ = max(one.least for one in seen) - min(one.base for one in seen)
        learned = differ * len(seen) / (len(seen) - 1)
        return min(max(learned, MIN_SHARE * base), MAX_SHARE * base)


def boot_of(epoch: str) -> str:
    """Return the part of ``epoch`` that all workers of one engine process have in common."""
    try:
        return Epoch.parse(epoch).boot_id
    except ValueError:
        return epoch


def _lower(before: Start | None, state: BudgetState | None) -> Start | None:
    if state is None or state.current is None or state.baseline is None:
        return before
    level = state.current - (state.explained or 0)
    if before is None:
        return Start(state.baseline, level)
    return Start(before.base, min(before.least, level))


def _with(seen: list[Start], one: Start | None) -> list[Start]:
    if one is None:
        return seen
    if seen and abs(one.base - seen[-1].base) > MAX_SHARE * seen[-1].base:
        return [one]
    return [*seen, one][-KEPT:]
