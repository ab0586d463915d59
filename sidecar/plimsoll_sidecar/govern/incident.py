"""Define an incident and its life cycle, as the governor uses it and the journal stores it.

::

Open -> Trimming -> Confirmed -> AwaitingSlot -> [Draining] -> Restarting -> Verifying -> ended

A new epoch leads from any phase to Verifying. A suspicion that ends before anything disruptive
started ends the incident. A restart that was refused or returned too little leads back to
Confirmed, where the next rung is chosen.
"""

from __future__ import annotations

import hashlib

import msgspec

from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incident_record import Attribution, IncidentRecord, StepRecord
from plimsoll_api.incidents import ENDED_PHASES, IncidentKind
from plimsoll_api.incidents import IncidentPhase as P
from plimsoll_api.supervision import Action

ROUND_S = 4.5
"""Length of a round in seconds: five assessments, about a second apart."""
EVEN_ODDS, SUBSIDED_S = 0.5, 30.0
"""Odds below which, and seconds after which, confirmed growth has subsided.

A trend that pauses between two bursts falls below even odds only for seconds.
"""
MAX_STEPS = 64
"""Maximum number of steps kept per incident: the first and the newest ones.

A ladder needs about twenty.
"""


DISRUPTING_PHASES = frozenset({P.DRAINING, P.RESTARTING, P.VERIFYING})
"""Phases of an incident in which no other incident may start anything disruptive."""


class Incident(IncidentRecord, omit_defaults=True, kw_only=True):
    """An incident, with the state that the governor needs to continue after a crash."""

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
    meets_partner: bool = False
    met_since: float | None = None
    partner_lost: str = ""
    refusals: int = 0
    sent: int = 0

    def budget(self, assessment: Assessment) -> BudgetState | None:
        """Return the leak budget that this incident consumes; None for kinds without a budget."""
        return find_budget(self.kind, self.attribution.segment, assessment)

    @property
    def owner(self) -> str | None:
        """Role of the process that holds the memory, or the segment if no process holds it."""
        segment = self.attribution.segment
        return segment if segment == Segment.SHARED_ORPHAN else self.attribution.process

    @property
    def has_subsided(self) -> bool:
        """Whether the odds of a confirmed leak have been low for :data:`SUBSIDED_S`."""
        growth = self.kind in (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH)
        return growth and self.doubted_s >= SUBSIDED_S

    @property
    def is_disrupting(self) -> bool:
        """Whether an action of this incident is disrupting the engine, or is about to."""
        return self.phase in DISRUPTING_PHASES and self.rung is not Action.POD_REPLACE

    @property
    def needs_slot(self) -> bool:
        """Whether the incident must keep its slot."""
        starts_over = self.refusals or self.waits is not None or not self.escalated
        return not (self.phase is P.CONFIRMED and starts_over)

    @property
    def short_id(self) -> str:
        """Last part of the name, short enough for an operation ID."""
        return self.name.rpartition("-")[2]

    def make_operation_id(self, verb: str) -> str:
        """Return an ID for the next command that this incident has never used.

        The number of sent commands is stored, because the timeline drops steps. An older journal
        lacks it.
        """
        self.sent = max(self.sent, sum(1 for step in self.timeline if step.operation_id)) + 1
        return f"{self.short_id}-{self.sent:02d}-{verb}"

    def add_step(self, step: StepRecord) -> None:
        """Add a step to the timeline. If the timeline is full, drop a step from its middle."""
        self.timeline.append(step)
        if len(self.timeline) > MAX_STEPS:
            del self.timeline[MAX_STEPS // 2]

    def enter(self, phase: P, now: float) -> None:
        """Start ``phase`` at ``now``, and reset the times that were counted in the previous phase.

        Do nothing if the incident is already in ``phase``.
        """
        if phase is not self.phase:
            self.phase, self.phase_since, self.seen_s, self.missed_s = phase, now, 0.0, 0.0
            self.waits = None

    def observe(self, suspicion: Suspicion, counted_s: float) -> None:
        """Update the incident from a suspicion that counts as ``counted_s`` seconds.

        The largest growth stays on record. The attribution no longer changes once a restart has
        started, because samples then mix the old and the new engine.
        """
        self.seen_s, self.missed_s = self.seen_s + counted_s, 0.0
        self.doubted_s = self.doubted_s + counted_s if suspicion.confidence < EVEN_ODDS else 0.0
        self.growth_bytes = suspicion.bytes
        self.unconfirmed = suspicion.unconfirmed is not None
        self.consumed_ratio = max(self.consumed_ratio, suspicion.consumed_ratio)
        if self.phase in DISRUPTING_PHASES:
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
            evidence=[*suspicion.evidence, *self._explain_unconfirmed(suspicion)],
        )

    def _explain_unconfirmed(self, suspicion: Suspicion) -> list[str]:
        if suspicion.unconfirmed is None or self.confirmed_at is not None:
            return []
        return [f"not confirmed yet: {suspicion.unconfirmed}"]


def compute_counted_s(elapsed_s: float) -> float:
    """Return ``elapsed_s``, the seconds since the previous assessment, within bounds.

    The bounds make a round consist of at least two assessments, however far apart, and at most
    five.
    """
    return min(max(ROUND_S / 5, elapsed_s), ROUND_S / 2)


def make_incident_name(replica: str, kind: IncidentKind, epoch: str, opened_at: float) -> str:
    """Return ``REPLICA-ID``, which stays the same after a restart of the supervisor.

    Names of Kubernetes objects have at most 253 characters.
    """
    digest = hashlib.sha256(f"{replica}/{kind}/{epoch}/{opened_at:.3f}".encode()).hexdigest()
    return f"{replica[:244]}-{digest[:8]}"


def find_budget(
    kind: IncidentKind, segment: str | None, assessment: Assessment
) -> BudgetState | None:
    """Return the leak budget that growth of ``segment`` consumes; None for kinds without one.

    Device memory that the allocator keeps unused has a separate budget.
    """
    if kind is IncidentKind.HOST_GROWTH:
        return assessment.host
    if kind is IncidentKind.DEVICE_GROWTH and segment == Segment.TORCH_RESERVED_UNUSED:
        return assessment.reserved or assessment.device
    if kind in (IncidentKind.DEVICE_GROWTH, IncidentKind.ORPHAN_DEVICE_MEMORY):
        return assessment.device
    return None


NEXT_PHASES: dict[P, frozenset[P]] = {
    P.OPEN: frozenset({P.TRIMMING, P.CONFIRMED, P.VERIFYING, P.RESOLVED}),
    P.TRIMMING: frozenset({P.CONFIRMED, P.VERIFYING, P.RESOLVED}),
    P.CONFIRMED: frozenset({P.AWAITING_SLOT, P.VERIFYING, *ENDED_PHASES}),
    P.AWAITING_SLOT: frozenset({P.CONFIRMED, P.DRAINING, P.RESTARTING, P.VERIFYING, *ENDED_PHASES}),
    P.DRAINING: frozenset({P.CONFIRMED, P.RESTARTING, P.VERIFYING, P.UNRESOLVED}),
    P.RESTARTING: frozenset({P.CONFIRMED, P.VERIFYING, P.RESOLVED, P.UNRESOLVED}),
    P.VERIFYING: frozenset({P.CONFIRMED, P.RESOLVED, P.UNRESOLVED}),
    P.RESOLVED: frozenset(),
    P.SUPPRESSED: frozenset(),
    P.UNRESOLVED: frozenset(),
}


class PhaseChangeError(Exception):
    """A phase cannot follow the current one, which is a bug in the governor."""


def move_to_phase(incident: Incident, phase: P, now: float) -> None:
    """Move ``incident`` to ``phase`` at ``now`` (Unix seconds).

    Raises :class:`PhaseChangeError` if :data:`NEXT_PHASES` does not allow it.
    """
    if phase is not incident.phase and phase not in NEXT_PHASES[incident.phase]:
        raise PhaseChangeError(
            f"incident {incident.name} cannot move from {incident.phase} to {phase}"
        )
    incident.enter(phase, now)
