"""An incident as the supervisor stores it in its journal and returns it in ``/state``.

:mod:`plimsoll_api.leakincident` defines the same incident as a Kubernetes object.
"""

from __future__ import annotations

import msgspec

from plimsoll_api.assessment import Trigger
from plimsoll_api.incidents import ENDED_PHASES, IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.open_enum import OpenEnum
from plimsoll_api.supervision import Action

JOURNAL_FILE = "journal.sqlite"
"""Name of the supervisor's journal, a SQLite database in its state directory. Each row of the table
``incidents`` contains an :class:`IncidentRecord` as JSON in the column ``body``."""


class Reason(OpenEnum):
    """Outcome of an incident (``status.outcome`` of a LeakIncident).

    ``LadderExhausted`` means that no action is left that is allowed and supported.
    ``PartlyReturned`` means that a restart returned only part of the memory growth.
    """

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
    PARTNER_LOST = "PartnerLost"
    EFFECT_UNKNOWN = "EffectUnknown"
    FAILED = "Failed"
    CONTAINER_RESTARTED = "ContainerRestarted"
    WORKER_RESTARTED = "WorkerRestarted"
    MANUAL_TRIM = "ManualTrim"
    MANUAL_DRAIN = "ManualDrain"
    MANUAL_RESTART = "ManualRestart"
    MANUAL_RESUME = "ManualResume"


class StepOutcome(OpenEnum):
    """Outcome of a step.

    ``Begun`` is written to the journal before the action is sent. If the newest step of an open
    incident has the outcome ``Requested``, the operator must act.
    """

    BEGUN = "Begun"
    REQUESTED = "Requested"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REFUSED = "Refused"
    WOULD = "Would"
    SKIPPED = "Skipped"
    UNKNOWN = "Unknown"


class StepRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One step of an incident.

    ``time`` and ``finished_at`` are in Unix seconds. ``before_bytes`` and ``after_bytes`` are
    memory of the incident's kind. If a trim has finished without an outcome, its ``after_bytes``
    has not been measured yet.

    A step that is sent to an engine has an ``operation_id``, which stays the same if the supervisor
    restarts and sends the step again.
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
    """Memory that grew, its growth rate, and the evidence.

    ``pod`` is None if the incident's own pod holds the memory.
    """

    segment: str | None = None
    process: str | None = None
    pod: str | None = None
    bytes: int = 0
    bytes_per_s: float | None = None
    bytes_per_request: float | None = None
    confidence: float = 0.0
    trigger: Trigger | None = None
    evidence: list[str] = []


class IncidentRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One incident. Times are in Unix seconds.

    ``baseline_bytes`` is the replica's memory of this kind after the warm-up, and ``before_bytes``
    before the last action; null if unknown, as for a stall. ``rung`` is the last action on the
    ladder.
    """

    name: str
    kind: IncidentKind
    epoch: str
    opened_at: float
    phase: IncidentPhase = IncidentPhase.OPEN
    attribution: Attribution = msgspec.field(default_factory=Attribution)
    timeline: list[StepRecord] = []
    diagnostics: list[str] = []
    consumed_ratio: float = 0.0
    baseline_bytes: int | None = None
    before_bytes: int | None = None
    returned_bytes: int | None = None
    confirmed_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    message: str = ""
    waits: WaitReason | None = None
    rung: Action | None = None

    @property
    def ended(self) -> bool:
        """Whether the incident is in a final phase."""
        return self.phase in ENDED_PHASES
