"""Define the governor's state, which the journal stores, and the times of its decisions."""

from __future__ import annotations

import msgspec

from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.govern import ladder
from plimsoll_sidecar.govern.command import Command, SlotRequest, Verb
from plimsoll_sidecar.govern.incident import ROUND_S, Incident
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.verification import StartHistory

CONFIRM_S = 2 * ROUND_S
"""Seconds for which a suspicion must persist after the trim to be confirmed."""
SLOT_RETRY_S = 5.0
"""Seconds between two attempts to take a restart slot. Slots are held for about a minute."""
PARTNER_TEST_S = 180.0
"""Seconds for which a restarted engine is tested with its partner, every :data:`SLOT_RETRY_S`.

After that, the pod returns to its Services in any case: its partners may be the ones that fail.
"""
SLOT_WAIT_S = 1800.0
"""Longest wait in seconds for a slot.

The incident then ends, and may open again after its back-off.
"""
MAX_MANUAL_EPOCHS = 8
BACK_OFF_S = 300.0
BACK_OFF_MAX_S = 3600.0
MAX_REFUSALS = 3
MIN_TRIMMED_SHARE = 0.1
"""Minimum share of the growth that an effective trim frees.

A busy engine's memory varies by less without a trim.
"""


class Cooldown(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A time during which no new incident of a kind opens.

    It ends with the first condition that is met: a time, another epoch, or a round without
    suspicion. Without conditions, it lasts until the restart budget is reset.
    """

    until: float | None = None
    epoch: str | None = None
    while_suspected: bool = False
    absent_s: float = 0.0

    def has_ended(self, suspected: bool, epoch: str | None, now: float, counted_s: float) -> bool:
        """Report whether the suspicion may open an incident again."""
        self.absent_s = 0.0 if suspected else self.absent_s + counted_s
        if self.until is not None and now >= self.until:
            return True
        if self.epoch is not None and epoch is not None and epoch != self.epoch:
            return True
        return self.while_suspected and self.absent_s >= ROUND_S


class GovernorState(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The governor's state, serializable with msgspec.

    Attributes:
        quiet: The cooldown of each kind.
        failures: The number of unresolved incidents in a row, by kind.
        pending: The command in progress. After a restart of the supervisor, it is sent again with
            the same operation ID.
        slot_holder: The name of the incident for which the restart slot is held.
        exhausted: Whether restarts stay stopped until a person resets the restart budget.
        epoch: The last epoch that the engine reported.
        epoch_at: The time at which ``epoch`` was first reported.
        by_hand: The newest epochs that manual restarts may end.
        starts: The memory that the newest starts needed.

    """

    incidents: list[Incident] = []
    quiet: dict[IncidentKind, Cooldown] = {}
    failures: dict[IncidentKind, int] = {}
    restarts: list[Restart] = []
    pending: Command | None = None
    slot_holder: str | None = None
    exhausted: bool = False
    epoch: str | None = None
    epoch_at: float | None = None
    by_hand: list[str] = []
    starts: StartHistory = msgspec.field(default_factory=StartHistory)

    @property
    def slot_request(self) -> SlotRequest:
        """Request for the restart slot, from the incident that holds or needs it."""
        pending = self.pending
        return SlotRequest(self.slot_holder, pending is not None and pending.verb is Verb.TAKE_SLOT)

    def limit_waits(self, now: float) -> None:
        """Limit every wait to its original length.

        This is needed if the clock was set back while the supervisor was down: all times are then
        in the future.
        """
        for incident in self.incidents:
            incident.phase_since = min(incident.phase_since, now)
            incident.retry_at = min(incident.retry_at, now + SLOT_RETRY_S)
            if incident.met_since is not None:
                incident.met_since = min(incident.met_since, now)
            if incident.warm_at is not None:
                incident.warm_at = min(incident.warm_at, now)
        if self.epoch_at is not None:
            self.epoch_at = min(self.epoch_at, now)
        for quiet in self.quiet.values():
            if quiet.until is not None:
                quiet.until = min(quiet.until, now + BACK_OFF_MAX_S)


def shift_times(state: GovernorState, step_s: float) -> None:
    """Shift all times after the clock was moved by ``step_s``, so that waits keep their length.

    A clock that was set forward must not give restarts back. Call this while no incident is open.
    Ended incidents keep their times.
    """
    if state.epoch_at is not None:
        state.epoch_at = max(0.0, state.epoch_at + step_s)
    for restart in state.restarts:
        restart.at = max(0.0, restart.at + step_s)
    for quiet in state.quiet.values():
        if quiet.until is not None:
            quiet.until = max(0.0, quiet.until + step_s)


REASONS_UNTIL_CHANGE = (Reason.OBSERVED, Reason.EFFECT_UNKNOWN)
"""Reasons after which no new incident opens until the epoch or the suspicion changes."""


def start_cooldown(state: GovernorState, incident: Incident, now: float) -> None:
    """Start the cooldown of the ended incident's kind, depending on how the incident ended."""
    kind = incident.kind
    if incident.reason is Reason.CLEARED:
        return  # a suspicion that ended proves nothing about earlier actions
    if incident.phase is IncidentPhase.RESOLVED:
        state.failures.pop(kind, None)
    elif incident.reason in REASONS_UNTIL_CHANGE or kind not in ladder.CURABLE_KINDS:
        state.quiet[kind] = Cooldown(while_suspected=True, epoch=state.epoch)
    elif incident.reason is Reason.RESTART_BUDGET_EXHAUSTED:
        state.quiet[kind] = Cooldown()
    else:
        failures = state.failures[kind] = state.failures.get(kind, 0) + 1
        pause = min(BACK_OFF_S * 2.0 ** (failures - 1), BACK_OFF_MAX_S)
        state.quiet[kind] = Cooldown(until=now + pause)
