"""The life of one incident: what each phase waits for and what it begins.

::

    Open -> Trimming -> Confirmed -> AwaitingSlot -> [Draining] -> Restarting -> Verifying -> ended

A pod that is to be replaced waits in Restarting for the operator, and its incident ends with it.
A suspicion that goes away before something disruptive was begun ends the incident. A restart that
was refused leads back to Confirmed; one that returned too little leads to the next rung.
"""

from __future__ import annotations

from plimsoll_api.admin import Capability, EngineState
from plimsoll_api.supervision import Action, Mode
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.govern import ladder, restart_budget
from plimsoll_sidecar.govern.command import (
    Command,
    Happening,
    Outcome,
    Result,
    Verb,
)
from plimsoll_sidecar.govern.conditions import EXHAUSTED, Conditions
from plimsoll_sidecar.govern.incident import (
    Incident,
    Phase,
    Reason,
    StepOutcome,
    budget_of,
)
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import (
    CONFIRM_MAX_S,
    CONFIRM_ROUNDS,
    CONFIRM_SHARE,
    MAX_REFUSALS,
    ROUND,
    SLOT_RETRY_S,
    SLOT_WAIT_S,
)
from plimsoll_sidecar.govern.verify import Verdict, verdict

RESTART = {
    Action.WORKER_RESTART: Verb.RESTART_WORKER,
    Action.ENGINE_RESTART: Verb.RESTART_ENGINE,
}
WITHDRAWN = "PodReplaceWithdrawn"


class Life(Conditions):
    """The transitions of incidents within one turn."""

    def certain(self, kind: Kind) -> bool:
        """Whether the absence of a suspicion means that all is well, not that nothing is known."""
        return self.engine.answers and (kind is Kind.STALL or self.assessment.warm)

    def advance(self, incident: Incident) -> None:
        """Takes the incident as far as it goes without waiting for an answer."""
        pending = self.state.pending
        if pending is not None and pending.incident == incident.name:
            return
        match incident.phase:
            case Phase.OPEN:
                self._open(incident)
            case Phase.TRIMMING:
                self._trimming(incident)
            case Phase.CONFIRMED:
                self._confirmed(incident)
            case Phase.AWAITING_SLOT:
                self._awaiting_slot(incident)
            case Phase.RESTARTING if incident.rung is Action.POD_REPLACE:
                self._replacing(incident)
            case Phase.DRAINING | Phase.RESTARTING:
                # Nothing of ours is under way: the command was lost with an old journal.
                self._back(incident, "interrupted")
            case Phase.VERIFYING:
                self._verifying(incident)

    # ---- phases

    def _open(self, incident: Incident) -> None:
        if self._gone(incident) or incident.seen < ROUND:
            return
        if incident.kind is Kind.STALL:
            if self._diagnose(incident):
                self._confirm(incident)
            return
        reason = self.why_not(Action.TRIM, incident)
        if reason is None and not self.free:
            return
        incident.growth_at_trim = incident.growth_bytes
        self.enter(incident, Phase.TRIMMING)
        if reason is None:
            incident.before_bytes = self.current(incident)
            self.tell(Happening.REMEDIATION, incident, Action.TRIM)
            self.send(incident, Verb.TRIM, Action.TRIM.value)
        else:
            self._skip(incident, Action.TRIM, reason)

    def _trimming(self, incident: Incident) -> None:
        if self._gone(incident) or incident.seen < CONFIRM_ROUNDS * ROUND:
            return
        if incident.trimmed and incident.growth_bytes * 2 < incident.growth_at_trim:
            # The trim returned most of it: what is left must prove itself anew.
            incident.growth_at_trim, incident.seen = incident.growth_bytes, 0
            return
        # A clock that was set back meanwhile: the phase's begin is never in the future.
        since = min(incident.opened_at, incident.phase_since)
        if not incident.doubtful and self.now - since >= self._patience(incident):
            self._confirm(incident)

    def _patience(self, incident: Incident) -> float:
        """How long to watch before belief, in seconds since the incident opened."""
        budget = budget_of(incident.kind, self.assessment)
        left = budget.exhaustion_s if budget else None
        return min(CONFIRM_MAX_S, CONFIRM_SHARE * left) if left is not None else 0.0

    def _confirm(self, incident: Incident) -> None:
        incident.confirmed_at = self.now
        self.enter(incident, Phase.CONFIRMED)
        self.tell(Happening.CONFIRMED, incident)

    def _confirmed(self, incident: Incident) -> None:
        if self._gone(incident) or not self._diagnose(incident):
            return
        if incident.kind in ladder.CURABLE and not (incident.escalated or self.due(incident)):
            return
        rung = self.next_rung(incident)
        if rung is None:
            self.end(incident, Phase.UNRESOLVED, Reason.LADDER_EXHAUSTED)
        elif self.policy.mode is Mode.OBSERVE:
            incident.note(self.step(rung.value, StepOutcome.WOULD, "mode is Observe"))
            self.end(incident, Phase.SUPPRESSED, Reason.OBSERVED)
        elif self.budget_spent():
            self._stop(incident)
        elif self.waits_for_window(incident):
            return
        elif self.hold is None:
            incident.rung, incident.message = rung, ""
            self.enter(incident, Phase.AWAITING_SLOT)
            self._awaiting_slot(incident)

    def _awaiting_slot(self, incident: Incident) -> None:
        if self._gone(incident):
            return
        if self.policy.mode is Mode.OBSERVE or incident.rung != self.next_rung(incident):
            self.enter(incident, Phase.CONFIRMED)
        elif self.budget_spent():
            self._stop(incident)
        elif self.now - incident.phase_since > SLOT_WAIT_S:
            self.end(incident, Phase.UNRESOLVED, Reason.SLOT_TIMEOUT)
        elif self.disturbed(incident) or self.hold or not self.free or self._starts(incident):
            return
        elif self.state.slot_holder != incident.name:
            if self.now >= incident.retry_at:
                self.send(incident, Verb.TAKE_SLOT, "TakeSlot")
        else:
            self._begin(incident)

    def _starts(self, incident: Incident) -> bool:
        """An engine that starts is not restarted for its memory: it would never get further."""
        starting = (EngineState.STARTING, EngineState.WARMING)
        return incident.kind is not Kind.STALL and self.engine.state in starting

    def _begin(self, incident: Incident) -> None:
        """The first disruptive command of a rung; the restart is counted before it is sent."""
        assert incident.rung is not None
        assert self.state.epoch is not None
        incident.fenced_epoch, incident.warm_at, incident.least_bytes = self.state.epoch, None, None
        if not incident.escalated:
            incident.before_bytes = self.current(incident) or incident.before_bytes
        drains = (
            incident.rung is Action.ENGINE_RESTART
            and incident.kind is not Kind.STALL
            and self.engine.answers
            and Capability.DRAIN in self.engine.capabilities
        )
        self.enter(incident, Phase.DRAINING if drains else Phase.RESTARTING)
        self.tell(Happening.REMEDIATION, incident, incident.rung)
        operation: str | None = None
        if incident.rung is Action.POD_REPLACE:
            incident.tried.append(incident.rung)
            step = self.step(incident.rung.value, StepOutcome.REQUESTED, "the operator evicts it")
            step.before_bytes = incident.before_bytes
            incident.note(step)
        elif drains:
            operation = self.send(incident, Verb.DRAIN, "Drain").operation_id
        else:
            verb = RESTART[incident.rung]
            operation = self.send(incident, verb, incident.rung.value).operation_id
        restart_budget.record(
            self.state.restarts,
            Restart(at=self.now, epoch=incident.fenced_epoch, operation_id=operation),
            self.policy.restart_budget,
        )

    def _replacing(self, incident: Incident) -> None:
        """The request stands in the incident; the operator may be away, so that it only waits.

        A slot is not kept for longer than others would wait for it: the disruption budget of the
        eviction holds all the same.
        """
        if self.policy.mode is Mode.OBSERVE or Action.POD_REPLACE not in self.policy.ladder:
            restart_budget.withdraw(self.state.restarts, incident.fenced_epoch or "")
            incident.note(self.step(WITHDRAWN, StepOutcome.SUCCEEDED, "not allowed any more"))
            self._back(incident, "not allowed any more")
            return
        late = self.now - incident.phase_since > SLOT_WAIT_S
        holds = self.state.slot_holder == incident.name
        if not self._gone(incident) and late and holds and self.free:
            self.release_slot()

    def release_slot(self) -> None:
        """Gives back the slot that the state says is held."""
        holder = self.state.slot_holder
        assert holder is not None
        self.state.pending = self.turn.command = Command(
            verb=Verb.RELEASE_SLOT,
            operation_id=f"{holder.rpartition('-')[2]}-release-slot",
            incident=holder,
            epoch=self.state.epoch or "",
        )
        self.turn.changed = True

    def _verifying(self, incident: Incident) -> None:
        answer = verdict(incident, self.assessment, self.engine, self.memory.warmup_s, self.now)
        if answer is Verdict.WAIT:
            return
        if answer is Verdict.CURED:
            cause = Reason(incident.rung.value) if incident.rung else Reason.NEW_EPOCH
            self.end(incident, Phase.RESOLVED, cause)
        elif answer is Verdict.PARTLY or incident.rung is None:
            self.end(incident, Phase.UNRESOLVED, Reason.PARTLY_RETURNED)
        else:
            self._escalate(incident, "returned less than half of the growth")

    # ---- answers

    def finished(self, incident: Incident, command: Command, result: Result) -> None:
        """The command of an incident came back."""
        for step in incident.timeline:
            if step.operation_id == command.operation_id:
                step.outcome, step.message = StepOutcome(result.outcome.value), result.message
                step.finished_at, step.after_bytes = self.now, self.current(incident)
        incident.diagnostics.extend(result.diagnostics)
        ok = result.outcome is Outcome.SUCCEEDED
        self.tell(Happening.ADVANCED, incident)
        match command.verb:
            case Verb.DIAGNOSE:
                incident.diagnosed = True
            case Verb.TRIM:
                incident.trimmed, incident.seen, incident.missed = ok, 0, 0
            case Verb.TAKE_SLOT:
                incident.retry_at = self.now + SLOT_RETRY_S
                if ok or result.outcome is Outcome.UNKNOWN:
                    self.state.slot_holder = incident.name
            case Verb.DRAIN | Verb.RESTART_WORKER | Verb.RESTART_ENGINE:
                self._disrupted(incident, command, result)

    def _disrupted(self, incident: Incident, command: Command, result: Result) -> None:
        if incident.phase is Phase.VERIFYING:
            return
        if self.state.epoch != command.epoch:
            # Whatever the answer says: the epoch that was meant is over.
            self.enter(incident, Phase.VERIFYING)
        elif result.outcome is Outcome.UNKNOWN:
            self.end(incident, Phase.UNRESOLVED, Reason.EFFECT_UNKNOWN)
        elif result.outcome is Outcome.REFUSED:
            restart_budget.withdraw(self.state.restarts, command.epoch)
            self._back(incident, result.message)
        elif command.verb is Verb.DRAIN:
            # A drain that missed its deadline is followed by the restart all the same.
            self.enter(incident, Phase.RESTARTING)
            self.send(incident, Verb.RESTART_ENGINE, Action.ENGINE_RESTART.value)
        elif result.outcome is Outcome.SUCCEEDED:
            self.enter(incident, Phase.VERIFYING)
        else:
            self._escalate(incident, result.message)

    def renewed(self, incident: Incident, ended_epoch: str) -> None:
        """The engine is in a new epoch that this incident's own command did not bring."""
        if incident.phase is Phase.VERIFYING and incident.fenced_epoch == ended_epoch:
            return
        if incident.phase is not Phase.VERIFYING:
            incident.rung, incident.fenced_epoch = None, ended_epoch
        incident.warm_at, incident.least_bytes = None, None
        incident.note(self.step("NewEpoch", StepOutcome.SUCCEEDED, "the engine started anew"))
        self.enter(incident, Phase.VERIFYING)

    # ---- conditions

    def _stop(self, incident: Incident) -> None:
        self.state.exhausted = True
        self.end(incident, Phase.UNRESOLVED, Reason.RESTART_BUDGET_EXHAUSTED, EXHAUSTED)

    def _gone(self, incident: Incident) -> bool:
        """Ends an incident whose suspicion stayed away for a round."""
        if incident.escalated or incident.missed < ROUND:
            return False
        returned = max(0, incident.growth_at_trim - self.growth(incident))
        if incident.trimmed and returned * 2 >= incident.growth_at_trim > 0:
            incident.returned_bytes = returned
            message = f"the trim returned {format_bytes(returned)}"
            self.end(incident, Phase.RESOLVED, Reason.TRIM, message)
        elif incident.trimmed and incident.kind is Kind.CAPACITY_LOSS:
            self.end(incident, Phase.RESOLVED, Reason.TRIM, "the trim gave the capacity back")
        else:
            message = "no longer suspected"
            self.end(incident, Phase.RESOLVED, Reason.CLEARED, message)
        return True

    def _escalate(self, incident: Incident, message: str) -> None:
        if incident.rung is not None:
            incident.tried.append(incident.rung)
        incident.rung, incident.escalated, incident.message = None, True, message
        self.enter(incident, Phase.CONFIRMED)

    def _back(self, incident: Incident, message: str) -> None:
        incident.refusals += 1
        incident.rung = None
        if incident.refusals >= MAX_REFUSALS:
            self.end(incident, Phase.UNRESOLVED, Reason.REFUSED, message)
        else:
            self.enter(incident, Phase.CONFIRMED)

    def _diagnose(self, incident: Incident) -> bool:
        """Evidence before anything is destroyed, once an incident. True when there is no more."""
        if incident.diagnosed or self.hold or self.policy.mode is Mode.OBSERVE:
            return True
        if self.free:
            self.send(incident, Verb.DIAGNOSE, "Diagnostics")
        return False

    def _skip(self, incident: Incident, action: Action, reason: str) -> None:
        outcome = StepOutcome.WOULD if reason == "mode is Observe" else StepOutcome.SKIPPED
        incident.note(self.step(action.value, outcome, reason))
