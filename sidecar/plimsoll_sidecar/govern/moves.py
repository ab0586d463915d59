"""Changes of an incident: steps that several phases share, and results of its commands."""

from __future__ import annotations

from plimsoll_api.incident_record import Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.supervision import Action
from plimsoll_api.units import format_bytes, format_duration
from plimsoll_sidecar.detect.losses import SPENT_RATIO
from plimsoll_sidecar.govern import restart_budget
from plimsoll_sidecar.govern.command import Command, EventType, Outcome, Result, Verb
from plimsoll_sidecar.govern.context import EXHAUSTED, TurnContext
from plimsoll_sidecar.govern.incident import ROUND_S, Incident
from plimsoll_sidecar.govern.state import MAX_REFUSALS, MIN_TRIMMED, SLOT_RETRY_S
from plimsoll_sidecar.govern.verification import RETURNED_ENOUGH

WITHIN_BUDGET = "deferred: the leak budget is not spent, and memory will outlast a drain"
NOT_GROWING = "deferred: the leak budget is spent, but memory does not grow at present"
LIMIT_FAR = "deferred: the leak budget is spent, but memory does not reach a known limit within"
MANUALLY_DRAINED = "a person drained this replica: no restart until plimsoll resume"
WITHDRAWN = "PodReplaceWithdrawn"


def confirm(context: TurnContext, incident: Incident) -> None:
    """Confirm the incident, so that the ladder may act on it."""
    incident.confirmed_at = context.now
    context.enter(incident, IncidentPhase.CONFIRMED)
    context.emit(EventType.CONFIRMED, incident)


def escalate(context: TurnContext, incident: Incident, message: str) -> None:
    """Mark the present rung as tried, and return to the choice of the next one."""
    if incident.rung is not None:
        incident.tried.append(incident.rung)
    incident.rung, incident.escalated, incident.message = None, True, message
    context.enter(incident, IncidentPhase.CONFIRMED)


def request_replacement(context: TurnContext, incident: Incident) -> None:
    """Request the eviction of the pod from the operator, which reads the newest step."""
    incident.tried.append(Action.POD_REPLACE)
    text = "waiting for the operator to evict the pod"
    step = context.step(Action.POD_REPLACE.value, StepOutcome.REQUESTED, text)
    step.before_bytes = incident.before_bytes
    incident.note(step)


def leave_to_person(context: TurnContext, incident: Incident) -> bool:
    """Return whether a person drained the replica, which prevents all restarts until its resume.

    Withdraw requests and preparations for a restart. They do not count as refused.
    """
    if not context.engine.manually_drained:
        return False
    if incident.phase in (IncidentPhase.DRAINING, IncidentPhase.RESTARTING):
        restart_budget.withdraw(context.state.restarts, incident.fenced_epoch or "")
    if incident.phase is not IncidentPhase.CONFIRMED:
        newest = incident.timeline[-1] if incident.timeline else None
        if newest is not None and newest.outcome is StepOutcome.REQUESTED:
            incident.tried.remove(Action.POD_REPLACE)
            incident.note(context.step(WITHDRAWN, StepOutcome.SUCCEEDED, MANUALLY_DRAINED))
        incident.rung = None
        context.enter(incident, IncidentPhase.CONFIRMED)
    wait(context, incident, WaitReason.MANUALLY_DRAINED, MANUALLY_DRAINED)
    return True


def wait(context: TurnContext, incident: Incident, reason: WaitReason | None, message: str) -> bool:
    """Record the reason for which the incident waits. Return whether it has changed."""
    if (incident.waits, incident.message) == (reason, message):
        return False
    incident.waits, incident.message = reason, message
    context.emit(EventType.ADVANCED, incident)
    return True


def return_to_confirmed(context: TurnContext, incident: Incident, message: str) -> None:
    """Try the same rung again after a refusal, or end the incident after ``MAX_REFUSALS``."""
    incident.refusals += 1
    incident.rung = None
    if incident.refusals >= MAX_REFUSALS:
        context.end(incident, IncidentPhase.UNRESOLVED, Reason.REFUSED, message)
    else:
        context.enter(incident, IncidentPhase.CONFIRMED)


def stop_restarting(context: TurnContext, incident: Incident) -> None:
    """End the incident, and stop all restarts until a person resets the restart budget.

    A planned restart must not stop those of leaks.
    """
    if incident.kind is IncidentKind.RECYCLE:
        context.end(incident, IncidentPhase.RESOLVED, Reason.CLEARED, "no restart is left for it")
        return
    context.state.exhausted = True
    context.end(incident, IncidentPhase.UNRESOLVED, Reason.RESTART_BUDGET_EXHAUSTED, EXHAUSTED)


def end_if_gone(context: TurnContext, incident: Incident) -> bool:
    """End the incident if its suspicion was absent for a round. Return whether it ended."""
    if incident.escalated or incident.missed_s < ROUND_S:
        return False
    returned = max(0, incident.growth_at_trim - context.growth(incident))
    if incident.trimmed and returned * 2 >= incident.growth_at_trim > 0:
        incident.returned_bytes = returned
        message = f"the trim returned {format_bytes(returned)}"
        context.end(incident, IncidentPhase.RESOLVED, Reason.TRIM, message)
    elif incident.trimmed and incident.kind is IncidentKind.CAPACITY_LOSS:
        context.end(incident, IncidentPhase.RESOLVED, Reason.TRIM, "the trim returned the capacity")
    else:
        message = "no longer suspected"
        context.end(incident, IncidentPhase.RESOLVED, Reason.CLEARED, message)
    return True


def end_if_returned(context: TurnContext, incident: Incident) -> bool:
    """End the incident if its memory came back after restarts that did not help.

    Return whether it ended. The engine has a new baseline after a restart, so that the detector
    suspects nothing. Compare memory with its size before the restart instead.
    """
    if not incident.escalated or incident.missed_s < ROUND_S:
        return False
    budget, before, base = (
        incident.budget(context.assessment), incident.before_bytes, incident.baseline_bytes,
    )  # fmt: skip
    if before is not None and base is not None:
        if budget is None or budget.current is None:
            return False
        returned = before - (budget.current - (budget.explained or 0))
        if returned < RETURNED_ENOUGH * max(before - base, 1):
            return False
        incident.returned_bytes = returned
    elif not context.engine.answers:
        return False
    text = "no longer suspected while it waited for another pod"
    context.end(incident, IncidentPhase.RESOLVED, Reason.CLEARED, text)
    return True


def collect_diagnostics(context: TurnContext, incident: Incident) -> bool:
    """Request diagnostics once per incident, before a restart destroys the evidence.

    Return whether they are complete. They cost the engine time, so call this only before a restart.
    """
    if incident.kind is IncidentKind.RECYCLE:
        return True
    if incident.diagnosed or context.hold or context.reason_to_observe(incident) is not None:
        return True
    if context.is_free:
        context.send(incident, Verb.DIAGNOSE, "Diagnostics")
    return False


def waits_for_window(context: TurnContext, incident: Incident) -> bool:
    """Return whether a restart waits for the maintenance window.

    It does not if memory would end sooner, or if the time until then is unknown.
    """
    window, left = context.policy.maintenance_window, context.time_to_limit_s(incident)
    if window is None or incident.kind is IncidentKind.STALL or left is None:
        return False
    opens_s = window.opens_in(context.now)
    if not opens_s or left <= opens_s + context.policy.drain.deadline_s:
        return False
    message = f"waiting for the maintenance window at {window.opens_at}"
    if wait(context, incident, WaitReason.MAINTENANCE_WINDOW, message):
        incident.note(context.step("MaintenanceWindow", StepOutcome.SKIPPED, message))
    return True


def defer_restart(context: TurnContext, incident: Incident) -> None:
    """Record why a confirmed incident causes no restart: one would cost more than it gains."""
    if incident.subsided:
        if incident.waits is not WaitReason.SUBSIDED:  # the probability changes with every sample
            chance = incident.attribution.confidence
            message = f"deferred: the probability of a leak has fallen to {chance:.0%}"
            wait(context, incident, WaitReason.SUBSIDED, message)
        return
    suspicion = context.suspicions.get(incident.kind)
    spent = suspicion is not None and suspicion.over_budget
    message = NOT_GROWING if spent else WITHIN_BUDGET
    if suspicion is not None and spent and suspicion.growing:
        hours = context.memory.auto.limit_within_s
        message = f"{LIMIT_FAR} {format_duration(hours)} (spec.memory.auto.limitWithin)"
    if incident.kind is IncidentKind.CAPACITY_LOSS:
        message = f"no restart until {SPENT_RATIO:.0%} of the capacity is lost"
    wait(context, incident, None, message)


def release_slot(context: TurnContext) -> None:
    """Release the slot: the actuator then releases the Lease.

    The incident that held it asks again later, so that others can come first.
    """
    for incident in context.state.incidents:
        if incident.name == context.state.slot_holder:
            incident.retry_at = context.now + SLOT_RETRY_S
    context.state.slot_holder = None
    context.turn.changed = True


def give_up_trim(context: TurnContext) -> None:
    """Abandon the trim of a hung engine, so that the restart of a stall does not wait for it."""
    pending = context.state.pending
    if pending is None or pending.verb is not Verb.TRIM:
        return
    context.state.pending, context.turn.changed = None, True
    for other in context.state.incidents:
        for step in other.timeline:
            if step.operation_id == pending.operation_id:
                step.outcome, step.finished_at = StepOutcome.UNKNOWN, context.now
                step.message = "abandoned: the engine completes no step"


def judge_trim(context: TurnContext, incident: Incident) -> None:
    """Judge a trim by the memory one round later, whatever the engine reported."""
    step = next((s for s in incident.timeline if is_unmeasured_trim(s)), None)
    if step is None:
        return
    step.after_bytes = context.current(incident)
    if step.before_bytes is None or step.after_bytes is None:
        step.outcome = StepOutcome.UNKNOWN
    else:
        returned = step.before_bytes - step.after_bytes
        enough = returned >= MIN_TRIMMED * incident.growth_at_trim
        step.outcome = StepOutcome.SUCCEEDED if enough else StepOutcome.FAILED
        if not enough:
            nothing = f"too little memory came back: {format_bytes(max(0, returned))}"
            step.message = "; ".join(filter(None, (step.message, nothing)))
    context.emit(EventType.ADVANCED, incident)


def is_unmeasured_trim(step: StepRecord) -> bool:
    """Return whether the step is a trim that ended and has not been measured yet."""
    ended = step.outcome is StepOutcome.BEGUN and step.finished_at is not None
    return ended and step.step == Action.TRIM.value


def apply_result(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Apply the result of an incident's command."""
    for step in incident.timeline:
        if step.operation_id == command.operation_id:
            step.outcome, step.message = StepOutcome(result.outcome.value), result.message
            step.finished_at = context.now
            if command.verb is Verb.TRIM and _is_measurable(step, result):
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
            # An adapter may not see the memory that was freed. Only a measurement shows it.
            incident.trimmed = ok or result.outcome is Outcome.UNKNOWN
            incident.seen_s, incident.missed_s = 0.0, 0.0
        case Verb.TAKE_SLOT:
            apply_slot_result(context, incident, command, result)
        case Verb.LEAVE | Verb.DRAIN | Verb.RESTART_WORKER | Verb.RESTART_ENGINE:
            apply_restart_result(context, incident, command, result)


def apply_slot_result(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Apply the result of an attempt to take the slot.

    Merge repeated refusals for the same reason into one step: attempts may last half an hour.
    """
    incident.retry_at = context.now + SLOT_RETRY_S
    if len({_key(step) for step in incident.timeline[-2:]}) == len(incident.timeline[-2:]):
        context.emit(EventType.ADVANCED, incident)
    else:
        newest = incident.timeline.pop()
        incident.timeline[-1].finished_at = newest.finished_at
    incident.waits, incident.message = result.waits, result.message
    if result.outcome in (Outcome.SUCCEEDED, Outcome.UNKNOWN):
        context.state.slot_holder, incident.slot_at = incident.name, command.at


def apply_restart_result(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Apply the result of a drain or restart: verify it after success, else escalate."""
    if incident.phase is IncidentPhase.VERIFYING:
        return
    if context.state.epoch != command.epoch:
        # The fenced epoch has ended, whatever the result is.
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
        # The restart also follows a drain that missed its deadline.
        context.enter(incident, IncidentPhase.RESTARTING)
        context.send(incident, Verb.RESTART_ENGINE, Action.ENGINE_RESTART.value)
    elif result.outcome is Outcome.SUCCEEDED:
        context.enter(incident, IncidentPhase.VERIFYING)
    else:
        escalate(context, incident, result.message)


def follow_new_epoch(context: TurnContext, incident: Incident, ended_epoch: str) -> None:
    """Apply a new epoch that this incident's own command did not cause."""
    if incident.phase is IncidentPhase.VERIFYING and incident.fenced_epoch == ended_epoch:
        return
    for step in filter(is_unmeasured_trim, incident.timeline):
        step.outcome = StepOutcome.UNKNOWN  # its memory ended with the old epoch
    if incident.phase is not IncidentPhase.VERIFYING:
        incident.rung, incident.fenced_epoch = None, ended_epoch
    incident.warm_at, incident.least_bytes = None, None
    incident.note(context.step("NewEpoch", StepOutcome.SUCCEEDED, "the engine restarted"))
    context.enter(incident, IncidentPhase.VERIFYING)


def _key(step: StepRecord) -> tuple[str, StepOutcome, str]:
    return step.step, step.outcome, step.message


def _is_measurable(step: StepRecord, result: Result) -> bool:
    return step.before_bytes is not None and result.outcome in (Outcome.SUCCEEDED, Outcome.UNKNOWN)
