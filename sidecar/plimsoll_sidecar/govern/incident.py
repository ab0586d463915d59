"""Define an incident and its life cycle.

::

    Open -> Trimming -> Confirmed -> AwaitingSlot -> [Draining] -> Restarting -> Verifying -> ended

A new epoch moves an incident from any phase to Verifying. After a restart that was refused or freed
too little, the incident returns to Confirmed.
"""

from __future__ import annotations

import hashlib

import msgspec

from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incident_record import Attribution, IncidentRecord, StepRecord
from plimsoll_api.incidents import (
    ENDED_PHASES,
    GROWTH_INCIDENT_KINDS,
    IncidentKind,
    IncidentPhase,
)
from plimsoll_api.supervision import Action
from plimsoll_sidecar.detect.growth import LATEST_GROWTH_WINDOW_S

# About five assessments.
ROUND_DURATION_S = 4.5
# Growth has subsided after so many seconds in which memory did not grow, or a leak was less
# probable. The probability alone does not suffice: it follows the trend, which outlasts the growth
# by minutes.
SUBSIDED_PROBABILITY, SUBSIDED_AFTER_S = 0.5, 30.0
# New growth of this duration ends a pause. Noise rarely looks like growth for so long.
RESUMED_AFTER_S = LATEST_GROWTH_WINDOW_S / 2
# A complete remediation needs about twenty. A full timeline drops middle steps.
MAX_STORED_STEPS = 64


# Other incidents must not disrupt the engine meanwhile.
DISRUPTING_PHASES = frozenset(
    {IncidentPhase.DRAINING, IncidentPhase.RESTARTING, IncidentPhase.VERIFYING}
)


class Incident(IncidentRecord, omit_defaults=True, kw_only=True):
    """An incident, with the state that the governor needs after a restart of the supervisor.

    Attributes:
        phase_since: The time at which the current phase started, in Unix seconds.
        seen_s: The seconds in this phase with a suspicion.
        missed_s: The seconds since the last suspicion in this phase.
        doubted_s: The seconds for which memory has not grown, or a leak has been improbable. It
            has a maximum, and decreases if growth resumes after it has subsided.
        tried: The rungs that did not resolve the incident.
        unconfirmed: Whether the suspicion has another possible explanation.
        unhealthy_device: A device that the kubelet reports as unhealthy; None if unknown.
        trimmed: Whether a trim has run, and may have freed memory.
        diagnosed: Whether diagnostics were collected.
        escalated: Whether a rung did not resolve the incident.
        fenced_epoch: The epoch that a restart for this incident ends.
        growth_bytes: The growth in the last suspicion.
        growth_at_trim: The growth in bytes before the trim.
        warm_at: The time at which the engine had warmed up after the restart; None before.
        least_bytes: The lowest memory since ``warm_at``; None before.
        retry_at: The earliest time of the next request for a slot, or of the next partner test.
        slot_at: The time at which the restart was counted with its slot; None without a slot.
        meets_partner: Whether the engine must still be tested with its partner.
        met_since: The time of the first test with the partner; None before.
        partner_lost: The error of the last test with the partner; empty without an error.
        refusals: The number of refused restarts.
        sent: The number of commands so far.

    """

    phase_since: float = 0.0
    seen_s: float = 0.0
    missed_s: float = 0.0
    doubted_s: float = 0.0
    tried: list[Action] = msgspec.field(default_factory=list)
    unconfirmed: bool = False
    unhealthy_device: str | None = None
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

    def get_budget_state(self, assessment: Assessment) -> BudgetState | None:
        """Return the state of this incident's leak budget; None if its kind has no budget."""
        return find_budget_state(self.kind, self.attribution.segment, assessment)

    @property
    def owner(self) -> str | None:
        """Role of the process that holds the memory; None if unknown."""
        segment = self.attribution.segment
        return segment if segment == Segment.SHARED_ORPHAN else self.attribution.process

    @property
    def has_subsided(self) -> bool:
        """Whether the growth of this incident has subsided."""
        growth = self.kind in GROWTH_INCIDENT_KINDS
        return growth and self.doubted_s >= SUBSIDED_AFTER_S

    @property
    def is_disrupting(self) -> bool:
        """Whether an action of this incident disrupts the engine's requests now or soon."""
        return self.phase in DISRUPTING_PHASES and self.rung is not Action.POD_REPLACE

    @property
    def needs_slot(self) -> bool:
        """Whether a restart has started, so that the incident must keep its restart slot."""
        starts_over = self.refusals or self.waits is not None or not self.escalated
        return not (self.phase is IncidentPhase.CONFIRMED and starts_over)

    @property
    def short_id(self) -> str:
        """Last part of the name, short enough for an operation ID."""
        return self.name.rpartition("-")[2]

    def make_operation_id(self, verb: str) -> str:
        """Return a new ID for the next command of this incident, with the number of the command."""
        # A full timeline drops steps; an older journal lacks ``sent``.
        self.sent = max(self.sent, sum(1 for step in self.timeline if step.operation_id)) + 1
        return f"{self.short_id}-{self.sent:02d}-{verb}"

    def add_step(self, step: StepRecord) -> None:
        """Add a step to the timeline. A full timeline drops a step from its middle."""
        self.timeline.append(step)
        if len(self.timeline) > MAX_STORED_STEPS:
            del self.timeline[MAX_STORED_STEPS // 2]

    def set_phase(self, phase: IncidentPhase, now: float) -> None:
        """Enter ``phase`` and reset the durations, unless the incident is already in ``phase``."""
        if phase is not self.phase:
            self.phase, self.phase_since, self.seen_s, self.missed_s = phase, now, 0.0, 0.0
            self.waits = None

    def observe(self, suspicion: Suspicion, covered_s: float) -> None:
        """Update the incident from a suspicion of its kind that covers ``covered_s`` seconds.

        The attribution keeps the largest growth, and does not change after a restart has started.
        """
        self.seen_s, self.missed_s = self.seen_s + covered_s, 0.0
        if suspicion.growing and suspicion.confidence >= SUBSIDED_PROBABILITY:
            self.doubted_s = self.doubted_s - covered_s if self.has_subsided else 0.0
        elif self.confirmed_at is not None:
            self.doubted_s = min(self.doubted_s + covered_s, SUBSIDED_AFTER_S + RESUMED_AFTER_S)
        self.growth_bytes = suspicion.bytes
        self.unconfirmed = suspicion.unconfirmed is not None
        self.unhealthy_device = suspicion.unhealthy_device
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
        return [f"the suspicion is not confirmed yet: {suspicion.unconfirmed}"]


def compute_covered_s(elapsed_s: float) -> float:
    """Return the seconds that an assessment covers: a fifth to half of a round."""
    return min(max(ROUND_DURATION_S / 5, elapsed_s), ROUND_DURATION_S / 2)


def make_incident_name(replica: str, kind: IncidentKind, epoch: str, opened_at: float) -> str:
    """Return the name ``REPLICA-ID``, in which the ID is a hash of the arguments."""
    digest = hashlib.sha256(f"{replica}/{kind}/{epoch}/{opened_at:.3f}".encode()).hexdigest()
    return f"{replica[:244]}-{digest[:8]}"


def find_budget_state(
    kind: IncidentKind, segment: str | None, assessment: Assessment
) -> BudgetState | None:
    """Return the state of the leak budget for growth of ``segment``; None without a budget."""
    if kind is IncidentKind.HOST_GROWTH:
        return assessment.host
    if kind is IncidentKind.DEVICE_GROWTH and segment == Segment.TORCH_RESERVED_UNUSED:
        return assessment.reserved or assessment.device
    if kind in (IncidentKind.DEVICE_GROWTH, IncidentKind.ORPHAN_DEVICE_MEMORY):
        return assessment.device
    return None


NEXT_PHASES: dict[IncidentPhase, frozenset[IncidentPhase]] = {
    IncidentPhase.OPEN: frozenset(
        {
            IncidentPhase.TRIMMING,
            IncidentPhase.CONFIRMED,
            IncidentPhase.VERIFYING,
            IncidentPhase.RESOLVED,
        }
    ),
    IncidentPhase.TRIMMING: frozenset(
        {IncidentPhase.CONFIRMED, IncidentPhase.VERIFYING, IncidentPhase.RESOLVED}
    ),
    IncidentPhase.CONFIRMED: frozenset(
        {IncidentPhase.AWAITING_SLOT, IncidentPhase.VERIFYING, *ENDED_PHASES}
    ),
    IncidentPhase.AWAITING_SLOT: frozenset(
        {
            IncidentPhase.CONFIRMED,
            IncidentPhase.DRAINING,
            IncidentPhase.RESTARTING,
            IncidentPhase.VERIFYING,
            *ENDED_PHASES,
        }
    ),
    IncidentPhase.DRAINING: frozenset(
        {
            IncidentPhase.CONFIRMED,
            IncidentPhase.RESTARTING,
            IncidentPhase.VERIFYING,
            IncidentPhase.UNRESOLVED,
        }
    ),
    IncidentPhase.RESTARTING: frozenset(
        {
            IncidentPhase.CONFIRMED,
            IncidentPhase.VERIFYING,
            IncidentPhase.RESOLVED,
            IncidentPhase.UNRESOLVED,
        }
    ),
    IncidentPhase.VERIFYING: frozenset(
        {IncidentPhase.CONFIRMED, IncidentPhase.RESOLVED, IncidentPhase.UNRESOLVED}
    ),
    IncidentPhase.RESOLVED: frozenset(),
    IncidentPhase.SUPPRESSED: frozenset(),
    IncidentPhase.UNRESOLVED: frozenset(),
}


class PhaseChangeError(Exception):
    """A phase that must not follow the current phase: a bug in the governor."""


def move_to_phase(incident: Incident, phase: IncidentPhase, now: float) -> None:
    """Move ``incident`` to ``phase``. Raises :class:`PhaseChangeError`."""
    if phase is not incident.phase and phase not in NEXT_PHASES[incident.phase]:
        raise PhaseChangeError(
            f"incident {incident.name} must not move from phase {incident.phase} to phase {phase}"
        )
    incident.set_phase(phase, now)
