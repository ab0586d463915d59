"""One incident and its life cycle, as the governor keeps it and the journal stores it.

::

    Open -> Trimming -> Confirmed -> AwaitingSlot -> [Draining] -> Restarting -> Verifying -> ended

A new epoch leads from any phase to Verifying. A suspicion that goes away before anything disruptive
began ends the incident. A refused restart leads back to Confirmed, and so does a restart that
returned too little: the next rung follows from there.
"""

from __future__ import annotations

import hashlib

import msgspec

from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incident_record import Attribution, IncidentRecord, StepRecord
from plimsoll_api.incidents import ENDED, IncidentKind
from plimsoll_api.incidents import IncidentPhase as P
from plimsoll_api.supervision import Action

ROUND_S = 4.5
"""A round: five assessments a second apart, whose distances vary a little."""
EVEN, SUBSIDED_S = 0.5, 30.0
"""A growth that was confirmed has subsided once its odds are below even for so long: a trend that
ends for a moment, as between two bursts, takes them below for seconds."""
MAX_STEPS = 64
"""Steps kept of one incident: a ladder needs some twenty; the first and the newest are kept."""


DISRUPTING = frozenset({P.DRAINING, P.RESTARTING, P.VERIFYING})
"""While one incident is in these, no other may begin something disruptive."""


class Incident(IncidentRecord, omit_defaults=True, kw_only=True):
    """An incident and the governor's own bookkeeping, with which it continues after a crash."""

    phase_since: float = 0.0
    seen_s: float = 0.0
    missed_s: float = 0.0
    doubted_s: float = 0.0
    tried: list[Action] = msgspec.field(default_factory=list)
    unconfirmed: bool = False
    trimmed: bool = False
    diagnosed: bool = False
    escalated: bool = False
    fenced_epoch: str | None = None
    growth_bytes: int = 0
    growth_at_trim: int = 0
    warm_at: float | None = None
    least_bytes: int | None = None
    retry_at: float = 0.0
    slot_at: float | None = None
    refusals: int = 0
    sent: int = 0

    def budget(self, assessment: Assessment) -> BudgetState | None:
        """Return the leak budget that this incident spends; None for kinds without one."""
        return budget_of(self.kind, self.attribution.segment, assessment)

    @property
    def owner(self) -> str | None:
        """The role of the process that holds the memory, or the segment where none does."""
        segment = self.attribution.segment
        return segment if segment == Segment.SHARED_ORPHAN else self.attribution.process

    @property
    def subsided(self) -> bool:
        """Whether the growth is more likely no leak by now, although it was confirmed as one."""
        growth = self.kind in (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH)
        return growth and self.doubted_s >= SUBSIDED_S

    @property
    def disrupts(self) -> bool:
        """Whether an action of this incident has disturbed the engine, or is about to."""
        return self.phase in DISRUPTING and self.rung is not Action.POD_REPLACE

    @property
    def needs_slot(self) -> bool:
        """Whether a slot that this incident has taken must be kept."""
        starts_over = self.refusals or self.waits is not None or not self.escalated
        return not (self.phase is P.CONFIRMED and starts_over)

    @property
    def short_id(self) -> str:
        """The last part of the name, short enough for an operation id."""
        return self.name.rpartition("-")[2]

    def next_operation(self, verb: str) -> str:
        """Return an id for the next step: the same incident never uses one twice.

        Counted apart from the timeline, which forgets steps. An older journal has no count.
        """
        self.sent = max(self.sent, sum(1 for step in self.timeline if step.operation_id)) + 1
        return f"{self.short_id}-{self.sent:02d}-{verb}"

    def note(self, step: StepRecord) -> None:
        """Add a line to the timeline, dropping from its middle when it is full."""
        self.timeline.append(step)
        if len(self.timeline) > MAX_STEPS:
            del self.timeline[MAX_STEPS // 2]

    def enter(self, phase: P, now: float) -> None:
        """Begin ``phase`` at ``now`` and count its rounds from zero.

        Nothing happens if it is the present one.
        """
        if phase is not self.phase:
            self.phase, self.phase_since, self.seen_s, self.missed_s = phase, now, 0.0, 0.0
            self.waits = None

    def observe(self, suspicion: Suspicion, counted_s: float) -> None:
        """Take over what the detector says now; the worst growth seen stays on record.

        ``counted_s`` is how long it counts as seen.

        From the start of a restart on, the memory keeps the name for which the engine restarts:
        samples then show a mixture of the old and the new engine.
        """
        self.seen_s, self.missed_s = self.seen_s + counted_s, 0.0
        self.doubted_s = self.doubted_s + counted_s if suspicion.confidence < EVEN else 0.0
        self.growth_bytes = suspicion.bytes
        self.unconfirmed = suspicion.unconfirmed is not None
        self.consumed_ratio = max(self.consumed_ratio, suspicion.consumed_ratio)
        if self.phase in DISRUPTING:
            return
        self.attribution = Attribution(
            segment=suspicion.segment.value if suspicion.segment else None,
            process=suspicion.process,
            pod=suspicion.pod,
            bytes=max(self.attribution.bytes, suspicion.bytes),
            bytes_per_s=suspicion.bytes_per_s,
            bytes_per_request=suspicion.bytes_per_request,
            confidence=suspicion.confidence,
            trigger=suspicion.trigger or self.attribution.trigger,
            evidence=[*suspicion.evidence, *self._unconfirmed(suspicion)],
        )

    def _unconfirmed(self, suspicion: Suspicion) -> list[str]:
        """Return what else it may be, until it is confirmed: from then on it is believed."""
        if suspicion.unconfirmed is None or self.confirmed_at is not None:
            return []
        return [f"not confirmed yet: {suspicion.unconfirmed}"]


def counted_s(elapsed_s: float) -> float:
    """Return for how long one assessment counts, ``elapsed_s`` after the one before.

    A round takes two of them, however far apart, and five, however close.
    """
    return min(max(ROUND_S / 5, elapsed_s), ROUND_S / 2)


def incident_name(replica: str, kind: IncidentKind, epoch: str, opened_at: float) -> str:
    """``REPLICA-ID``: the same incident has the same name after every restart.

    Names of Kubernetes objects have at most 253 characters.
    """
    digest = hashlib.sha256(f"{replica}/{kind}/{epoch}/{opened_at:.3f}".encode()).hexdigest()
    return f"{replica[:244]}-{digest[:8]}"


def budget_of(
    kind: IncidentKind, segment: str | None, assessment: Assessment
) -> BudgetState | None:
    """Return the leak budget that growth of ``segment`` spends; None for kinds without one.

    What the device's allocator keeps unused is measured apart from what is in use.
    """
    if kind is IncidentKind.HOST_GROWTH:
        return assessment.host
    if kind is IncidentKind.DEVICE_GROWTH and segment == Segment.TORCH_RESERVED_UNUSED:
        return assessment.reserved or assessment.device
    if kind in (IncidentKind.DEVICE_GROWTH, IncidentKind.ORPHAN_DEVICE_MEMORY):
        return assessment.device
    return None


FOLLOWS: dict[P, frozenset[P]] = {
    P.OPEN: frozenset({P.TRIMMING, P.CONFIRMED, P.VERIFYING, P.RESOLVED}),
    P.TRIMMING: frozenset({P.CONFIRMED, P.VERIFYING, P.RESOLVED}),
    P.CONFIRMED: frozenset({P.AWAITING_SLOT, P.VERIFYING, *ENDED}),
    P.AWAITING_SLOT: frozenset({P.CONFIRMED, P.DRAINING, P.RESTARTING, P.VERIFYING, *ENDED}),
    P.DRAINING: frozenset({P.CONFIRMED, P.RESTARTING, P.VERIFYING, P.UNRESOLVED}),
    P.RESTARTING: frozenset({P.CONFIRMED, P.VERIFYING, P.RESOLVED, P.UNRESOLVED}),
    P.VERIFYING: frozenset({P.CONFIRMED, P.RESOLVED, P.UNRESOLVED}),
    P.RESOLVED: frozenset(),
    P.SUPPRESSED: frozenset(),
    P.UNRESOLVED: frozenset(),
}


class IllegalPhaseChange(Exception):
    """A phase that cannot follow the present one: a bug of the governor."""


def move(incident: Incident, phase: P, now: float) -> None:
    """Bring ``incident`` into ``phase`` at ``now`` (Unix seconds); the same phase changes nothing.

    Raises :class:`IllegalPhaseChange` where :data:`FOLLOWS` does not allow it.
    """
    if phase is not incident.phase and phase not in FOLLOWS[incident.phase]:
        raise IllegalPhaseChange(
            f"incident {incident.name} is {incident.phase} and cannot become {phase}"
        )
    incident.enter(phase, now)
