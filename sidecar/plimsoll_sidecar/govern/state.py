"""Define the governor's state, which the journal stores, and its waiting times."""

from __future__ import annotations

import msgspec

from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.govern import ladder
from plimsoll_sidecar.govern.command import Command, SlotRequest, Verb
from plimsoll_sidecar.govern.incident import ROUND_DURATION_S, Incident
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.verification import StartHistory

# A suspicion is confirmed if it persists for this long after the trim.
CONFIRMATION_DURATION_S = 2 * ROUND_DURATION_S
# A replica usually holds a slot for a minute.
SLOT_RETRY_INTERVAL_S = 5.0
# Afterwards, the pod returns to its Services in any case, because the fault may be in its partners.
PARTNER_TEST_DURATION_S = 180.0
# Afterwards, the incident ends, and another one can open after the back-off.
MAX_SLOT_WAIT_S = 1800.0
MAX_MANUAL_EPOCHS = 8
FIRST_BACK_OFF_S = 300.0
MAX_BACK_OFF_S = 3600.0
# The incident ends after this many refused restarts.
MAX_REFUSALS = 3
# An effective trim frees this share of the growth. The memory of a busy engine varies by less.
MIN_TRIMMED_SHARE = 0.1


class Cooldown(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Period in which no new incident of one kind opens.

    It ends with the first condition. Without conditions, it lasts until the restart budget is
    reset.

    Attributes:
        until: The time at which it ends, in Unix seconds; None without this condition.
        epoch: The epoch with which it ends; None without this condition.
        while_suspected: Whether it ends after a round without a suspicion.
        absent_s: The seconds without a suspicion so far.

    """

    until: float | None = None
    epoch: str | None = None
    while_suspected: bool = False
    absent_s: float = 0.0

    def has_ended(
        self, is_suspected: bool, epoch: str | None, now: float, covered_s: float
    ) -> bool:
        """Report whether the cooldown has ended at ``now`` (Unix seconds)."""
        self.absent_s = 0.0 if is_suspected else self.absent_s + covered_s
        if self.until is not None and now >= self.until:
            return True
        if self.epoch is not None and epoch is not None and epoch != self.epoch:
            return True
        return self.while_suspected and self.absent_s >= ROUND_DURATION_S


class GovernorState(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The governor's state, as the journal stores it.

    Attributes:
        incidents: The open incidents.
        cooldowns: The cooldown of each kind.
        failures: The number of consecutive unresolved incidents, by kind.
        restarts: The restarts that count against the restart budget.
        pending: The command in progress. A restarted supervisor sends it again with the same
            operation ID.
        slot_holder: The name of the incident that holds the restart slot; None without one.
        exhausted: Whether the restart budget is exhausted. No restart follows until a person resets
            the budget.
        epoch: The last epoch that the engine reported; None before the first.
        epoch_at: The time at which ``epoch`` was first reported, in Unix seconds.
        manual_epochs: The newest epochs that ended by a manual restart, and the current epoch while
            a manual restart is in progress.
        starts: The memory that the most recent starts of the engine needed.

    """

    incidents: list[Incident] = []
    cooldowns: dict[IncidentKind, Cooldown] = msgspec.field(default_factory=dict, name="quiet")
    failures: dict[IncidentKind, int] = {}
    restarts: list[Restart] = []
    pending: Command | None = None
    slot_holder: str | None = None
    exhausted: bool = False
    epoch: str | None = None
    epoch_at: float | None = None
    manual_epochs: list[str] = msgspec.field(default_factory=list, name="by_hand")
    starts: StartHistory = msgspec.field(default_factory=StartHistory)

    @property
    def slot_request(self) -> SlotRequest:
        """Request for the restart slot on behalf of :attr:`slot_holder`."""
        pending = self.pending
        return SlotRequest(self.slot_holder, pending is not None and pending.verb is Verb.TAKE_SLOT)

    def limit_waits(self, now: float) -> None:
        """Limit stored times, so that no wait is longer than its maximum.

        Stored times are in the future if the clock was set back while the supervisor was down.
        """
        for incident in self.incidents:
            incident.phase_since = min(incident.phase_since, now)
            incident.retry_at = min(incident.retry_at, now + SLOT_RETRY_INTERVAL_S)
            if incident.met_since is not None:
                incident.met_since = min(incident.met_since, now)
            if incident.warm_at is not None:
                incident.warm_at = min(incident.warm_at, now)
        if self.epoch_at is not None:
            self.epoch_at = min(self.epoch_at, now)
        for cooldown in self.cooldowns.values():
            if cooldown.until is not None:
                cooldown.until = min(cooldown.until, now + MAX_BACK_OFF_S)


def shift_times(state: GovernorState, step_s: float) -> None:
    """Shift all times by ``step_s`` seconds after the clock was set forward or back by as much.

    Call this while no incident is open; the times of ended incidents do not change.
    """
    if state.epoch_at is not None:
        state.epoch_at = max(0.0, state.epoch_at + step_s)
    for restart in state.restarts:
        restart.at = max(0.0, restart.at + step_s)
    for cooldown in state.cooldowns.values():
        if cooldown.until is not None:
            cooldown.until = max(0.0, cooldown.until + step_s)


# No new incident opens until another epoch begins or the suspicion ends.
REASONS_BLOCKING_UNTIL_CHANGE = (Reason.OBSERVED, Reason.EFFECT_UNKNOWN)


def start_cooldown(state: GovernorState, incident: Incident, now: float) -> None:
    """Start the cooldown after an ended incident. A resolved incident causes none."""
    kind = incident.kind
    if incident.reason is Reason.CLEARED:
        return  # a suspicion that ended proves nothing about earlier actions
    if incident.phase is IncidentPhase.RESOLVED:
        state.failures.pop(kind, None)
    elif incident.reason in REASONS_BLOCKING_UNTIL_CHANGE or kind not in ladder.CURABLE_KINDS:
        state.cooldowns[kind] = Cooldown(while_suspected=True, epoch=state.epoch)
    elif incident.reason is Reason.RESTART_BUDGET_EXHAUSTED:
        state.cooldowns[kind] = Cooldown()
    else:
        failures = state.failures[kind] = state.failures.get(kind, 0) + 1
        pause = min(FIRST_BACK_OFF_S * 2.0 ** (failures - 1), MAX_BACK_OFF_S)
        state.cooldowns[kind] = Cooldown(until=now + pause)
