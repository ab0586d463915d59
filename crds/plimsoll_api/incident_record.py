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
"""Name of the supervisor's journal, a SQLite database, whose table ``incidents`` has an
:class:`IncidentRecord` as JSON in the column ``body`` of each row."""


class Reason(OpenEnum):
    """Outcome of an incident (``status.outcome`` of a LeakIncident).

    ``LadderExhausted``: all allowed and supported actions have been tried. ``PartlyReturned``: a
    restart freed only a part of the growth.
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

    ``Begun`` is written before an action is sent, and replaced when the action has ended. The
    operator must carry out an action that is ``Requested`` in the newest step of an open incident.
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
    """One step of an incident. Times are in Unix seconds.

    Attributes:
        operation_id: The ID of the operation, for a step that is sent to an engine. It stays the
            same if the supervisor restarts and sends the step again.
        before_bytes, after_bytes: The memory of the incident's kind before and after the step;
            None if it has not been measured.

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

    ``pod`` is None if the memory is in the incident's own pod.
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

    Attributes:
        baseline_bytes: The replica's memory of this kind after the warm-up; None if unknown.
        before_bytes: The same memory before the last action; None if unknown.
        reason: The outcome; None while the incident is open.
        waits: The reason why a restart waits.
        rung: The last action that was taken.

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
