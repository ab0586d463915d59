"""The input and output of one turn of the governor, and the conditions of its decisions."""

from __future__ import annotations

import math
from collections.abc import Collection

from plimsoll_api.admin import DrainMode, EngineState
from plimsoll_api.assessment import Assessment, Suspicion
from plimsoll_api.incident_record import Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import NEAR_LIMIT_RATIO, MemoryPolicy
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern import ladder, restart_budget
from plimsoll_sidecar.govern.command import Command, EngineView, Event, EventType, Turn, Verb
from plimsoll_sidecar.govern.incident import DISRUPTING, Incident, move
from plimsoll_sidecar.govern.state import GovernorState, start_cooldown

LEAVING = (Action.ENGINE_RESTART, Action.POD_REPLACE)
"""Actions that take the pod out of its service temporarily."""
STALLED_S = 1.0
"""Do not wait for a hung engine: its streams stay silent meanwhile."""


class TurnContext:
    """The input of one turn, and the methods that change the state."""

    def __init__(
        self,
        state: GovernorState,
        policy: Supervision,
        memory: MemoryPolicy,
        assessment: Assessment,
        engine: EngineView,
        now: float,
        hold: str | None,
        turn: Turn,
        learning: Collection[IncidentKind] = (),
    ) -> None:
        self.state, self.policy, self.memory = state, policy, memory
        self.learning = learning
        self.assessment, self.engine, self.now = assessment, engine, now
        self.hold, self.turn = hold, turn
        self.suspicions: dict[IncidentKind, Suspicion] = {}

    def emit(self, what: EventType, incident: Incident, action: Action | None = None) -> None:
        """Record an event of this turn, and request a write of the journal.

        An incident advances at most once a turn.
        """
        self.turn.changed = True
        if what is EventType.ADVANCED and any(
            event.incident is incident and event.type is what for event in self.turn.events
        ):
            return
        self.turn.events.append(Event(type=what, at=self.now, incident=incident, action=action))

    def enter(self, incident: Incident, phase: IncidentPhase) -> None:
        """Move the incident to ``phase``, and emit the event."""
        move(incident, phase, self.now)
        self.emit(EventType.ADVANCED, incident)

    def end(
        self, incident: Incident, phase: IncidentPhase, reason: Reason, message: str = ""
    ) -> None:
        """Close the incident with a reason, and start the cooldown of its kind."""
        move(incident, phase, self.now)
        incident.ended_at, incident.reason, incident.message = self.now, reason, message
        start_cooldown(self.state, incident, self.now)
        cleared = reason is Reason.CLEARED
        self.emit(EventType.CLEARED if cleared else EventType.ENDED, incident)

    def send(self, incident: Incident, verb: Verb, name: str) -> Command:
        """Return the new pending command. Its operation id stays the same if it is sent again."""
        carry = verb is Verb.RESTART_WORKER
        mode = self.policy.drain.mode
        if not carry and mode is DrainMode.CARRY:
            mode = DrainMode.FINISH  # nothing survives the end of the engine's process
        stalled = incident.kind is IncidentKind.STALL
        deadline_s = 0.0 if mode is DrainMode.ABORT else self.policy.drain.deadline_s
        command = Command(
            verb=verb,
            operation_id=incident.next_operation(verb.value),
            incident=incident.name,
            epoch=self.state.epoch or incident.epoch,
            stalled=stalled,
            leaves=incident.rung in LEAVING
            and not stalled
            and not self.exhausts_before_drain(incident),
            planned=incident.kind is IncidentKind.RECYCLE,
            process=self._diagnosed(incident) if verb is Verb.DIAGNOSE else None,
            mode=mode,
            deadline_s=min(deadline_s, STALLED_S) if stalled else deadline_s,
            at=self.now if verb is Verb.TAKE_SLOT else None,
        )
        step = self.step(name, StepOutcome.BEGUN, "")
        step.operation_id, step.before_bytes = command.operation_id, self.current(incident)
        incident.note(step)
        self.state.pending = self.turn.command = command
        self.turn.changed = True
        return command

    @staticmethod
    def _diagnosed(incident: Incident) -> str | None:
        seen = incident.attribution
        return seen.process if seen.pod is None else None

    def step(self, name: str, outcome: StepOutcome, message: str) -> StepRecord:
        """Return an entry of the timeline at this turn's time."""
        return StepRecord(time=self.now, step=name, outcome=outcome, message=message)

    @property
    def is_free(self) -> bool:
        """Whether no command is pending. At most one may be."""
        return self.state.pending is None

    def current(self, incident: Incident) -> int | None:
        """Return the memory of the incident's budget in bytes, or None if it is unknown."""
        budget = incident.budget(self.assessment)
        return budget.current if budget else None

    def time_to_limit_s(self, incident: Incident) -> float | None:
        """Return the seconds until memory of the incident's kind reaches its limit.

        None if that is unknown, infinite if nothing grows. The leak budget is much smaller than
        this limit: a spent budget is a reason to act, at the limit the engine ends.
        """
        budget = incident.budget(self.assessment)
        if budget is None or budget.current is None:
            return None
        if not budget.bytes_per_s or budget.bytes_per_s <= 0:
            return math.inf
        if budget.limit is None:
            return None
        return max(0.0, budget.limit - budget.current) / budget.bytes_per_s

    def reason_to_observe(self, incident: Incident) -> str | None:
        """Return why nothing is done about the incident but to report it; None if more is done."""
        if self.policy.mode is Mode.OBSERVE:
            return "mode is Observe"
        return LEARNING if incident.kind in self.learning else None

    def defers_restart(self, incident: Incident) -> bool:
        """Report whether an ``Auto`` budget defers a restart because the limit is not near.

        An ``Auto`` budget is the usual growth, not the growth that the owner allows. Memory with an
        unknown limit counts as lasting.
        """
        budget = self.memory.auto_of(incident.kind)
        if budget is None or self.at_limit(incident):
            return False
        left = self.time_to_limit_s(incident)
        return left is None or left > self.memory.auto.limit_within_s

    def at_limit(self, incident: Incident) -> bool:
        """Return whether memory is close to its limit."""
        budget = incident.budget(self.assessment)
        if budget is None or budget.limit is None or budget.current is None:
            return False
        return budget.current >= NEAR_LIMIT_RATIO * budget.limit

    def exhausts_before_drain(self, incident: Incident) -> bool:
        """Return whether memory ends before a drain would: then leaving loses less than staying."""
        left = self.time_to_limit_s(incident)
        return left is not None and left <= self.policy.drain.deadline_s

    def growth(self, incident: Incident) -> int:
        """Return the unexplained growth in bytes, or the last suspected one if it is unknown."""
        budget = incident.budget(self.assessment)
        known = budget.unexplained if budget else None
        return incident.growth_bytes if known is None else known


LEARNING = "growthBudget Auto still learns what this service gains"
EXHAUSTED = (
    "the restart budget is spent; no further action until you reset it with plimsoll resume POD"
)


def is_conclusive(context: TurnContext, kind: IncidentKind) -> bool:
    """Return whether the absence of a suspicion proves that there is no problem."""
    return context.engine.answers and (kind is IncidentKind.STALL or context.assessment.warm)


def reason_to_skip(
    context: TurnContext, action: Action, incident: Incident
) -> tuple[StepOutcome, str] | None:
    """Return the outcome and reason for which ``action`` is not taken now; None if it is taken.

    The outcome is ``Would`` if only the mode, or a budget that is still learned, prevents it.
    """
    reason = ladder.reason_to_skip(action, incident, context.policy, context.engine)
    observes = context.reason_to_observe(incident)
    if reason is None and observes is not None:
        return StepOutcome.WOULD, observes
    if reason is None and context.state.exhausted:
        reason = EXHAUSTED
    reason = reason or context.hold
    return None if reason is None else (StepOutcome.SKIPPED, reason)


def is_restart_due(context: TurnContext, incident: Incident) -> bool:
    """Return whether a restart is worth it: the budget is spent, or memory ends before a drain.

    The budget is the growth that a replica may have: growth that stops within it costs no restart.
    A restart gains nothing if memory does not grow at this moment, unless it is at its limit. The
    same holds for growth that has turned out more likely to be no leak. If the budget is ``Auto``,
    the limit must be near as well. None of this holds for a stall, or for an incident that a
    restart did not cure.
    """
    if incident.kind is IncidentKind.RECYCLE:
        return incident.kind in context.suspicions or incident.escalated
    unmeasured = incident.kind is IncidentKind.STALL or incident.kind not in ladder.CURABLE
    if unmeasured or incident.escalated:
        return True
    suspicion = context.suspicions.get(incident.kind)
    grows = suspicion is not None and suspicion.growing and not incident.subsided
    if suspicion is None or not (grows or context.at_limit(incident)):
        return False
    spent = suspicion.over_budget and not context.defers_restart(incident)
    return spent or context.exhausts_before_drain(incident)


def is_restart_budget_spent(context: TurnContext) -> bool:
    """Return whether the replica has no restart left, by count or by the hard stop."""
    left = restart_budget.remaining(
        context.state.restarts, context.policy.restart_budget, context.now
    )
    return context.state.exhausted or left == 0


def is_disrupted(context: TurnContext, incident: Incident) -> bool:
    """Return whether another incident's restart is in progress.

    It ends with the new epoch: its verification disturbs nothing. A pod that waits for its
    replacement may be restarted meanwhile, because the operator can be down.
    """
    return any(
        other is not incident
        and other.phase in DISRUPTING
        and other.rung not in (None, Action.POD_REPLACE)
        and (
            other.phase is not IncidentPhase.VERIFYING or other.fenced_epoch == context.state.epoch
        )
        for other in context.state.incidents
    )


def is_engine_starting(context: TurnContext, incident: Incident) -> bool:
    """Return whether the engine is starting. A restart for its memory would never let it finish."""
    starting = (EngineState.STARTING, EngineState.WARMING)
    return incident.kind is not IncidentKind.STALL and context.engine.state in starting
