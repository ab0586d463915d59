"""One incident and its life cycle, as the governor keeps it and the journal stores it."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from plimsoll_api.supervision import Action
from plimsoll_sidecar.detect.assessment import Assessment, BudgetState, Kind, Suspicion, Trigger

MAX_STEPS = 64
"""Steps kept of one incident: a ladder needs some twenty; the first and the newest are kept."""


class Phase(StrEnum):
    """Where an incident stands (LeakIncident ``status.phase``)."""

    OPEN = "Open"
    TRIMMING = "Trimming"
    CONFIRMED = "Confirmed"
    AWAITING_SLOT = "AwaitingSlot"
    DRAINING = "Draining"
    RESTARTING = "Restarting"
    VERIFYING = "Verifying"
    RESOLVED = "Resolved"
    UNRESOLVED = "Unresolved"
    SUPPRESSED = "Suppressed"


ENDED = frozenset({Phase.RESOLVED, Phase.UNRESOLVED, Phase.SUPPRESSED})
DISRUPTING = frozenset({Phase.DRAINING, Phase.RESTARTING, Phase.VERIFYING})
"""While one incident is in these, no other may begin something disruptive."""


class Reason(StrEnum):
    """How an incident ended (LeakIncident ``status.outcome``)."""

    CLEARED = "Cleared"
    TRIM = "Trim"
    WORKER_RESTART = "WorkerRestart"
    ENGINE_RESTART = "EngineRestart"
    NEW_EPOCH = "NewEpoch"
    OBSERVED = "Observed"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    LADDER_EXHAUSTED = "LadderExhausted"
    PARTLY_RETURNED = "PartlyReturned"
    SLOT_TIMEOUT = "SlotTimeout"
    REFUSED = "Refused"
    EFFECT_UNKNOWN = "EffectUnknown"


class StepOutcome(StrEnum):
    """What became of a step. ``Begun`` is in the journal before anything is sent; ``Requested``
    is for the operator to do, as long as it is the newest step of an incident that is open."""

    BEGUN = "Begun"
    REQUESTED = "Requested"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REFUSED = "Refused"
    WOULD = "Would"
    SKIPPED = "Skipped"
    UNKNOWN = "Unknown"


class Step(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One line of the timeline. ``time`` is Unix seconds; bytes are those of the incident's kind.

    ``operation_id`` is set on steps that are sent somewhere: sent again after a supervisor's
    restart, it names the same operation.
    """

    time: float
    step: str
    outcome: StepOutcome
    operation_id: str | None = None
    finished_at: float | None = None
    before_bytes: int | None = None
    after_bytes: int | None = None
    message: str = ""


class Attribution(msgspec.Struct, omit_defaults=True):
    """Which memory grew, how fast, and why we think so."""

    segment: str | None = None
    process: str | None = None
    bytes: int = 0
    bytes_per_s: float | None = None
    bytes_per_request: float | None = None
    confidence: float = 0.0
    trigger: Trigger | None = None
    evidence: list[str] = []


class Incident(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Identity, what was seen, what was done; the last block is the governor's own bookkeeping.

    ``baseline_bytes`` and ``before_bytes`` are the replica's memory of this kind after warm-up and
    at the begin of the last action; null where unknown (a stall has none).
    """

    name: str
    kind: Kind
    epoch: str
    opened_at: float
    phase: Phase = Phase.OPEN
    attribution: Attribution = msgspec.field(default_factory=Attribution)
    timeline: list[Step] = []
    diagnostics: list[str] = []
    consumed_ratio: float = 0.0
    baseline_bytes: int | None = None
    before_bytes: int | None = None
    returned_bytes: int | None = None
    confirmed_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    message: str = ""

    phase_since: float = 0.0
    seen: int = 0
    missed: int = 0
    tried: list[Action] = []
    doubtful: bool = False
    rung: Action | None = None
    trimmed: bool = False
    diagnosed: bool = False
    escalated: bool = False
    fenced_epoch: str | None = None
    growth_bytes: int = 0
    growth_at_trim: int = 0
    warm_at: float | None = None
    least_bytes: int | None = None
    retry_at: float = 0.0
    refusals: int = 0

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def needs_slot(self) -> bool:
        """Whether a slot that this incident has taken must be kept."""
        return not (self.phase is Phase.CONFIRMED and self.refusals)

    @property
    def short_id(self) -> str:
        return self.name.rpartition("-")[2]

    def next_operation(self, verb: str) -> str:
        """An id for the next step: the same incident never uses one twice."""
        sent = sum(1 for step in self.timeline if step.operation_id)
        return f"{self.short_id}-{sent + 1:02d}-{verb}"

    def note(self, step: Step) -> None:
        """Adds a line to the timeline, dropping from its middle when it is full."""
        self.timeline.append(step)
        if len(self.timeline) > MAX_STEPS:
            del self.timeline[MAX_STEPS // 2]

    def enter(self, phase: Phase, now: float) -> None:
        if phase is not self.phase:
            self.phase, self.phase_since, self.seen, self.missed = phase, now, 0, 0

    def observe(self, suspicion: Suspicion) -> None:
        """Takes over what the detector says now; the worst growth seen stays on record.

        From the begin of a restart on the memory keeps the name that it was restarted for: what
        is seen then is half of an engine that ends and half of one that starts.
        """
        self.seen, self.missed = self.seen + 1, 0
        self.growth_bytes = suspicion.bytes
        self.doubtful = suspicion.doubt is not None
        self.consumed_ratio = max(self.consumed_ratio, suspicion.consumed_ratio)
        if self.phase in DISRUPTING:
            return
        self.attribution = Attribution(
            segment=suspicion.segment.value if suspicion.segment else None,
            process=suspicion.process,
            bytes=max(self.attribution.bytes, suspicion.bytes),
            bytes_per_s=suspicion.bytes_per_s,
            bytes_per_request=suspicion.bytes_per_request,
            confidence=max(self.attribution.confidence, suspicion.confidence),
            trigger=suspicion.trigger or self.attribution.trigger,
            evidence=list(suspicion.evidence),
        )


def incident_name(replica: str, kind: Kind, epoch: str, opened_at: float) -> str:
    """``REPLICA-ID``: the same incident has the same name after every restart.

    Names of Kubernetes objects have at most 253 characters.
    """
    digest = hashlib.sha256(f"{replica}/{kind}/{epoch}/{opened_at:.3f}".encode()).hexdigest()
    return f"{replica[:244]}-{digest[:8]}"


def budget_of(kind: Kind, assessment: Assessment) -> BudgetState | None:
    """The leak budget that incidents of this kind spend; None for those without one."""
    if kind is Kind.HOST_GROWTH:
        return assessment.host
    if kind in (Kind.DEVICE_GROWTH, Kind.ORPHAN_DEVICE_MEMORY):
        return assessment.device
    return None
