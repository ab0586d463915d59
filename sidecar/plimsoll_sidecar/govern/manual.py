"""What a person did to a replica by hand, as a record like an incident's.

It ended when it began to be told, and nothing follows from it. A restart counts in the restart
budget by its epoch.
"""

from __future__ import annotations

import msgspec

from plimsoll_api.incident_record import Attribution, Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.govern.command import Outcome
from plimsoll_sidecar.govern.incident import Incident

ACTIONS = {
    "trim": Reason.MANUAL_TRIM,
    "drain": Reason.MANUAL_DRAIN,
    "restart": Reason.MANUAL_RESTART,
    "resume": Reason.MANUAL_RESUME,
}
FAILURES = {
    Outcome.REFUSED: Reason.REFUSED,
    Outcome.FAILED: Reason.FAILED,
    Outcome.UNKNOWN: Reason.EFFECT_UNKNOWN,
}


class ManualAction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action by hand.

    ``id`` is its own; ``outcome`` is None while it is under way. Times are Unix seconds.
    """

    id: str
    action: str
    epoch: str
    at: float
    outcome: Outcome | None = None
    message: str = ""
    finished_at: float | None = None

    @property
    def ends_epoch(self) -> bool:
        """Whether the end of this epoch is, or may be, this action's doing."""
        return self.action == "restart" and self.outcome in (None, Outcome.SUCCEEDED)


def record(action: ManualAction, replica: str, now: float) -> Incident:
    """Return the record of an action that has ended. Its name is made from the action's id."""
    outcome = action.outcome or Outcome.UNKNOWN
    ended = action.finished_at or now
    reason = FAILURES.get(outcome, ACTIONS[action.action])
    step = StepRecord(
        time=action.at,
        step=ACTIONS[action.action].value,
        outcome=StepOutcome(outcome.value),
        operation_id=action.id,
        finished_at=ended,
        message=action.message,
    )
    evidence = [f"a person ran plimsoll {action.action} in epoch {action.epoch}"]
    return Incident(
        name=f"{replica[:244]}-{action.id[-8:]}",
        kind=IncidentKind.MANUAL_ACTION,
        epoch=action.epoch,
        opened_at=action.at,
        phase=IncidentPhase.RESOLVED,
        phase_since=ended,
        attribution=Attribution(confidence=1.0, evidence=evidence),
        timeline=[step],
        ended_at=ended,
        reason=reason,
        message=action.message,
    )
