"""What an incident must meet before something is done about it."""

from __future__ import annotations

from plimsoll_api.supervision import Action, Mode
from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.govern import ladder, restart_budget, window
from plimsoll_sidecar.govern.command import Happening
from plimsoll_sidecar.govern.context import Context
from plimsoll_sidecar.govern.incident import DISRUPTING, Incident, budget_of

EXHAUSTED = (
    "the restart budget is spent: nothing further is done until a person resets it"
    " (plimsoll-supervisor --reset-restart-budget)"
)


class Conditions(Context):
    """Conditions, within one turn."""

    def why_not(self, action: Action, incident: Incident) -> str | None:
        reason = ladder.why_not(
            action,
            incident.kind,
            incident.attribution.process,
            self.policy.ladder,
            self.engine,
        )
        if reason is None and self.policy.mode is Mode.OBSERVE:
            return "mode is Observe"
        if reason is None and self.state.exhausted:
            return EXHAUSTED
        return reason or self.hold

    def next_rung(self, incident: Incident) -> Action | None:
        return ladder.next_disruptive(
            incident.kind,
            incident.attribution.process,
            incident.tried,
            self.policy.ladder,
            self.engine,
        )

    def due(self, incident: Incident) -> bool:
        """The budget is spent, or will be before a careful drain could end."""
        if incident.kind is Kind.STALL:
            return True
        suspicion = self.suspicions.get(incident.kind)
        if suspicion is None:
            return False
        budget = budget_of(incident.kind, self.assessment)
        left = budget.exhaustion_s if budget else None
        return suspicion.over_budget or (left is not None and left <= self.policy.drain.deadline_s)

    def budget_spent(self) -> bool:
        left = restart_budget.remaining(self.state.restarts, self.policy.restart_budget, self.now)
        return self.state.exhausted or left == 0

    def disturbed(self, incident: Incident) -> bool:
        """A pod that waits to be replaced may be helped meanwhile: its operator can be away."""
        return any(
            other is not incident
            and other.phase in DISRUPTING
            and other.rung is not Action.POD_REPLACE
            for other in self.state.incidents
        )

    def waits_for_window(self, incident: Incident) -> bool:
        """Whether a restart can wait for the maintenance window: memory is known to last so long.

        What is not known to last is not waited with.
        """
        opens_s = window.opens_in(self.policy.maintenance_window, self.now)
        left = self.lasts_s(incident)
        if not opens_s or incident.kind is Kind.STALL or left is None:
            return False
        if left <= opens_s + self.policy.drain.deadline_s:
            return False
        assert self.policy.maintenance_window is not None
        at = window.clock(self.policy.maintenance_window)
        message = f"waits for the maintenance window at {at}"
        if incident.message != message:
            incident.message = message
            self.tell(Happening.ADVANCED, incident)
        return True
