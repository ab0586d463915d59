"""Hold the input and output of a turn, and decide whether a restart is due or can wait."""

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
from plimsoll_sidecar.govern.incident import DISRUPTING_PHASES, Incident, move_to_phase
from plimsoll_sidecar.govern.state import GovernorState, start_cooldown

LEAVING_ACTIONS = (Action.ENGINE_RESTART, Action.POD_REPLACE)
# A longer drain of a stalled engine is useless, because no stream continues.
MAX_STALLED_DRAIN_S = 1.0


class TurnContext:
    """Input and output of one turn, and the methods that change the governor's state.

    Args:
        state: The governor's state.
        policy: The supervision settings of the configuration.
        memory: The memory settings of the configuration.
        assessment: The detector's assessment of the newest sample.
        engine: The state of the engine in this sample.
        now: The time in Unix seconds.
        hold: The reason why no command may be sent; None if commands may be sent.
        turn: The output, which the methods fill.
        learning: The kinds whose budget has not been learned yet.

    """

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

    def emit_event(
        self, event_type: EventType, incident: Incident, action: Action | None = None
    ) -> None:
        """Add an event to this turn, at most one ``Advanced`` for each incident."""
        self.turn.changed = True
        if event_type is EventType.ADVANCED and any(
            event.incident is incident and event.type is event_type for event in self.turn.events
        ):
            return
        self.turn.events.append(
            Event(type=event_type, at=self.now, incident=incident, action=action)
        )

    def enter_phase(self, incident: Incident, phase: IncidentPhase) -> None:
        """Move the incident to ``phase``, and emit the event ``Advanced``."""
        move_to_phase(incident, phase, self.now)
        self.emit_event(EventType.ADVANCED, incident)

    def end_incident(
        self, incident: Incident, phase: IncidentPhase, reason: Reason, message: str = ""
    ) -> None:
        """End the incident in ``phase`` with ``reason``, and start the cooldown of its kind."""
        move_to_phase(incident, phase, self.now)
        incident.ended_at, incident.reason, incident.message = self.now, reason, message
        start_cooldown(self.state, incident, self.now)
        cleared = reason is Reason.CLEARED
        self.emit_event(EventType.CLEARED if cleared else EventType.ENDED, incident)

    def set_pending_command(
        self, incident: Incident, verb: Verb, step_name: str, gives_up: bool = False
    ) -> Command:
        """Create the pending command, add its step to the incident, and return the command."""
        carry = verb is Verb.RESTART_WORKER
        mode = self.policy.drain.mode
        if not carry and mode is DrainMode.CARRY:
            mode = DrainMode.FINISH  # no request survives the end of the engine's process
        starting = incident.kind is IncidentKind.ORPHAN_DEVICE_MEMORY and not self.engine.answers
        stalled = incident.kind is IncidentKind.STALL or starting
        deadline_s = 0.0 if mode is DrainMode.ABORT else self.policy.drain.deadline_s
        command = Command(
            verb=verb,
            operation_id=incident.make_operation_id(verb.value),
            incident=incident.name,
            epoch=self.state.epoch or incident.epoch,
            stalled=stalled,
            leaves=incident.rung in LEAVING_ACTIONS
            and not stalled
            and not self.will_memory_run_out_before_drain(incident),
            planned=incident.kind is IncidentKind.RECYCLE,
            meets_partner=verb is Verb.RESTART_ENGINE and self.engine.meets_partner,
            gives_up=gives_up,
            process=self._find_diagnosed_process(incident) if verb is Verb.DIAGNOSE else None,
            mode=mode,
            deadline_s=min(deadline_s, MAX_STALLED_DRAIN_S) if stalled else deadline_s,
            at=self.now if verb is Verb.TAKE_SLOT else None,
        )
        step = self.make_step(step_name, StepOutcome.BEGUN, "")
        step.operation_id, step.before_bytes = (
            command.operation_id,
            self.get_current_bytes(incident),
        )
        incident.add_step(step)
        self.state.pending = self.turn.command = command
        self.turn.changed = True
        return command

    @staticmethod
    def _find_diagnosed_process(incident: Incident) -> str | None:
        seen = incident.attribution
        return seen.process if seen.pod is None else None

    def make_step(self, name: str, outcome: StepOutcome, message: str) -> StepRecord:
        """Return an entry of the timeline at the time of this turn."""
        return StepRecord(time=self.now, step=name, outcome=outcome, message=message)

    @property
    def has_no_pending_command(self) -> bool:
        """Whether no command is in progress."""
        return self.state.pending is None

    def get_current_bytes(self, incident: Incident) -> int | None:
        """Return the size of the memory that the incident's budget limits; None if unknown."""
        budget = incident.get_budget_state(self.assessment)
        return budget.current if budget else None

    def estimate_time_to_limit_s(self, incident: Incident) -> float | None:
        """Return the seconds until memory reaches its limit, and the engine ends.

        None if unknown; infinite if the memory does not grow.
        """
        budget = incident.get_budget_state(self.assessment)
        if budget is None or budget.current is None:
            return None
        if not budget.bytes_per_s or budget.bytes_per_s <= 0:
            return math.inf
        if budget.limit is None:
            return None
        return max(0.0, budget.limit - budget.current) / budget.bytes_per_s

    def explain_why_observing(self, incident: Incident) -> str | None:
        """Return the reason why no action on the incident is allowed; None if one is allowed."""
        if self.policy.mode is Mode.OBSERVE:
            return "mode is Observe"
        return LEARNING_MESSAGE if incident.kind in self.learning else None

    def can_defer_restart(self, incident: Incident) -> bool:
        """Report whether a restart can wait although the ``Auto`` budget is spent.

        An ``Auto`` budget describes the usual growth. A restart for it is urgent only near a known
        memory limit.
        """
        budget = self.memory.get_auto_budget(incident.kind)
        if budget is None or self.is_at_limit(incident):
            return False
        left = self.estimate_time_to_limit_s(incident)
        return left is None or left > self.memory.auto.limit_within_s

    def is_at_limit(self, incident: Incident) -> bool:
        """Report whether memory is at least ``NEAR_LIMIT_RATIO`` of its limit."""
        budget = incident.get_budget_state(self.assessment)
        if budget is None or budget.limit is None or budget.current is None:
            return False
        return budget.current >= NEAR_LIMIT_RATIO * budget.limit

    def will_memory_run_out_before_drain(self, incident: Incident) -> bool:
        """Report whether memory would reach its limit before a drain ends."""
        left = self.estimate_time_to_limit_s(incident)
        return left is not None and left <= self.policy.drain.deadline_s

    def get_growth_bytes(self, incident: Incident) -> int:
        """Return the unexplained growth, or that of the last suspicion if unknown."""
        budget = incident.get_budget_state(self.assessment)
        unexplained = budget.unexplained if budget else None
        return incident.growth_bytes if unexplained is None else unexplained


LEARNING_MESSAGE = "growthBudget is Auto, and the usual growth of this service is not learned yet"
EXHAUSTED_MESSAGE = (
    "the restart budget is exhausted: no further action until you reset it with plimsoll resume POD"
)


def is_absence_conclusive(context: TurnContext, kind: IncidentKind) -> bool:
    """Report whether the absence of a suspicion of ``kind`` shows that there is no problem."""
    return context.engine.answers and (kind is IncidentKind.STALL or context.assessment.warm)


def find_skip_outcome(
    context: TurnContext, action: Action, incident: Incident
) -> tuple[StepOutcome, str] | None:
    """Return the outcome and the reason if ``action`` is skipped now; None if it is allowed."""
    reason = ladder.find_skip_reason(action, incident, context.policy, context.engine)
    observes = context.explain_why_observing(incident)
    if reason is None and observes is not None:
        return StepOutcome.WOULD, observes
    if reason is None and context.state.exhausted:
        reason = EXHAUSTED_MESSAGE
    reason = reason or context.hold
    return None if reason is None else (StepOutcome.SKIPPED, reason)


def is_restart_due(context: TurnContext, incident: Incident) -> bool:
    """Report whether a restart is due: always for a stall, and after an action without effect.

    For growth, the leak budget must be spent, or memory would reach its limit before a drain could
    end. Memory must also still grow and probably leak, or be at its limit.
    """
    if incident.kind is IncidentKind.RECYCLE:
        return incident.kind in context.suspicions or incident.escalated
    unmeasured = incident.kind is IncidentKind.STALL or incident.kind not in ladder.CURABLE_KINDS
    if unmeasured or incident.escalated:
        return True
    suspicion = context.suspicions.get(incident.kind)
    grows = suspicion is not None and suspicion.growing and not incident.has_subsided
    if suspicion is None or not (grows or context.is_at_limit(incident)):
        return False
    spent = suspicion.over_budget and not context.can_defer_restart(incident)
    return spent or context.will_memory_run_out_before_drain(incident)


def is_restart_budget_spent(context: TurnContext) -> bool:
    """Report whether the restart budget allows no further restart of this replica."""
    left = restart_budget.count_remaining_restarts(
        context.state.restarts, context.policy.restart_budget, context.now
    )
    return context.state.exhausted or left == 0


def is_other_restart_running(context: TurnContext, incident: Incident) -> bool:
    """Report whether a restart for another incident is in progress.

    A pod that waits for its replacement does not count, because the operator may be down.
    """
    return any(
        other is not incident
        and other.phase in DISRUPTING_PHASES
        and other.rung not in (None, Action.POD_REPLACE)
        and (
            other.phase is not IncidentPhase.VERIFYING or other.fenced_epoch == context.state.epoch
        )
        for other in context.state.incidents
    )


def is_engine_starting(context: TurnContext, incident: Incident) -> bool:
    """Report whether a restart must wait because the engine is starting; False for a stall."""
    starting = (EngineState.STARTING, EngineState.WARMING)
    return incident.kind is not IncidentKind.STALL and context.engine.state in starting
