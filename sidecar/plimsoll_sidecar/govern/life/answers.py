"""What a command's result, or a new epoch, means for its incident: one function a verb."""

from __future__ import annotations

from plimsoll_api.incident_record import Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.command import Command, EventType, Outcome, Result, Verb
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.life.context import TurnContext
from plimsoll_sidecar.govern.life.moves import (
    escalate,
    leave_to_person,
    measured_later,
    request_replacement,
    return_to_confirmed,
)
from plimsoll_sidecar.govern.policy import restart_budget
from plimsoll_sidecar.govern.state import SLOT_RETRY_S


def finished(context: TurnContext, incident: Incident, command: Command, result: Result) -> None:
    """Take in the answer to an incident's command."""
    for step in incident.timeline:
        if step.operation_id == command.operation_id:
            step.outcome, step.message = StepOutcome(result.outcome.value), result.message
            step.finished_at = context.now
            if command.verb is Verb.TRIM and _measurable(step, result):
                step.outcome = StepOutcome.BEGUN
            elif command.verb is not Verb.RESTART_ENGINE:
                step.after_bytes = context.current(incident)
    incident.diagnostics.extend(result.diagnostics)
    ok = result.outcome is Outcome.SUCCEEDED
    if command.verb is not Verb.TAKE_SLOT:
        context.emit(EventType.ADVANCED, incident)
    match command.verb:
        case Verb.DIAGNOSE:
            incident.diagnosed = True
        case Verb.TRIM:
            # An adapter may not see the memory that it was for: then only its size tells.
            incident.trimmed = ok or result.outcome is Outcome.UNKNOWN
            incident.seen, incident.missed = 0, 0
        case Verb.TAKE_SLOT:
            slot_answered(context, incident, command, result)
        case Verb.LEAVE | Verb.DRAIN | Verb.RESTART_WORKER | Verb.RESTART_ENGINE:
            disrupted(context, incident, command, result)


def slot_answered(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Take note of a try to get the slot.

    One that is refused for the same reason as the one before it leaves no trace of its own: it may
    wait for half an hour.
    """
    incident.retry_at = context.now + SLOT_RETRY_S
    if len({_said(step) for step in incident.timeline[-2:]}) == len(incident.timeline[-2:]):
        context.emit(EventType.ADVANCED, incident)
    else:
        newest = incident.timeline.pop()
        incident.timeline[-1].finished_at = newest.finished_at
    incident.waits, incident.message = result.waits, result.message
    if result.outcome in (Outcome.SUCCEEDED, Outcome.UNKNOWN):
        context.state.slot_holder, incident.slot_at = incident.name, command.at


def disrupted(context: TurnContext, incident: Incident, command: Command, result: Result) -> None:
    """Go on after a drain or restart.

    Verify if the epoch changed or it succeeded, else escalate.
    """
    if incident.phase is IncidentPhase.VERIFYING:
        return
    if context.state.epoch != command.epoch:
        # Whatever the answer says: the epoch that was meant is over.
        context.enter(incident, IncidentPhase.VERIFYING)
    elif result.outcome is Outcome.UNKNOWN:
        context.end(incident, IncidentPhase.UNRESOLVED, Reason.EFFECT_UNKNOWN)
    elif result.outcome is Outcome.REFUSED:
        restart_budget.withdraw(context.state.restarts, command.epoch)
        return_to_confirmed(context, incident, result.message)
    elif command.verb in (Verb.LEAVE, Verb.DRAIN) and leave_to_person(context, incident):
        return
    elif command.verb is Verb.LEAVE:
        context.enter(incident, IncidentPhase.RESTARTING)
        request_replacement(context, incident)
    elif command.verb is Verb.DRAIN:
        # A drain that missed its deadline is followed by the restart all the same.
        context.enter(incident, IncidentPhase.RESTARTING)
        context.send(incident, Verb.RESTART_ENGINE, Action.ENGINE_RESTART.value)
    elif result.outcome is Outcome.SUCCEEDED:
        context.enter(incident, IncidentPhase.VERIFYING)
    else:
        escalate(context, incident, result.message)


def renewed(context: TurnContext, incident: Incident, ended_epoch: str) -> None:
    """Take in a new epoch that this incident's own command did not bring."""
    if incident.phase is IncidentPhase.VERIFYING and incident.fenced_epoch == ended_epoch:
        return
    for step in filter(measured_later, incident.timeline):
        step.outcome = StepOutcome.UNKNOWN  # the memory that it was measured by is gone
    if incident.phase is not IncidentPhase.VERIFYING:
        incident.rung, incident.fenced_epoch = None, ended_epoch
    incident.warm_at, incident.least_bytes = None, None
    incident.note(context.step("NewEpoch", StepOutcome.SUCCEEDED, "the engine restarted"))
    context.enter(incident, IncidentPhase.VERIFYING)


def _said(step: StepRecord) -> tuple[str, StepOutcome, str]:
    return step.step, step.outcome, step.message


def _measurable(step: StepRecord, result: Result) -> bool:
    """Whether memory will show what a trim did. One that failed by its own account did nothing."""
    return step.before_bytes is not None and result.outcome in (Outcome.SUCCEEDED, Outcome.UNKNOWN)
