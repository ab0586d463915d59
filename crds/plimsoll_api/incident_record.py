"""An incident as the supervisor stores it: in its journal, in ``/state``, and for local commands.

:mod:`plimsoll_api.leakincident` is the same incident as a Kubernetes object.
"""

from __future__ import annotations

import msgspec

from plimsoll_api.assessment import Trigger
from plimsoll_api.incidents import ENDED, IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.open_enum import OpenEnum
from plimsoll_api.supervision import Action

JOURNAL_FILE = "journal.sqlite"
"""File of the supervisor's journal in its state directory, a SQLite database. Each row of its table
``incidents`` has an :class:`IncidentRecord` as JSON in the column ``body``."""


class Reason(OpenEnum):
    """The outcome of an incident (LeakIncident ``status.outcome``)."""

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

    ``Begun`` is written to the journal before anything is sent. ``Requested`` is for the operator,
    as long as it is the newest step of an open incident.
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
    """One entry of an incident's timeline.

    ``time`` is in Unix seconds; bytes are those of the incident's kind. A trim with ``finished_at``
    and no outcome will be measured by its ``after_bytes``.

    A step that is sent to an engine has an ``operation_id``. If it is sent again after a restart of
    the supervisor, it names the same operation.
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
    """The memory that grew, its rate, and the evidence.

    ``pod`` is None if the memory is that of the incident's own pod.
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
    """An incident's observations and actions. Times are Unix seconds.

    ``baseline_bytes`` and ``before_bytes`` are the replica's memory of this kind after warm-up and
    before the last action; null if unknown (a stall has none). ``rung`` is the action reached on
    the ladder.
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
        return self.phase in ENDED
