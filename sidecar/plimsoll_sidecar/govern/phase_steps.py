"""Steps that several phases of an incident share."""

from __future__ import annotations

from plimsoll_api.incident_record import Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.supervision import Action
from plimsoll_api.units import format_bytes, format_duration
from plimsoll_sidecar.detect.losses import MIN_LOSS_RATIO_FOR_RESTART
from plimsoll_sidecar.govern import restart_budget
from plimsoll_sidecar.govern.command import Command, EventType, Outcome, Result, Verb
from plimsoll_sidecar.govern.context import EXHAUSTED_MESSAGE, TurnContext
from plimsoll_sidecar.govern.incident import (
    ROUND_DURATION_S,
    SUBSIDED_AFTER_S,
    SUBSIDED_PROBABILITY,
    Incident,
)
from plimsoll_sidecar.govern.state import MAX_REFUSALS, MIN_TRIMMED_SHARE, SLOT_RETRY_INTERVAL_S
from plimsoll_sidecar.govern.verification import MIN_CURED_SHARE

WITHIN_BUDGET_MESSAGE = (
    "the restart is deferred: the leak budget is not spent, and memory lasts until a drain "
    "could end"
)
NOT_GROWING_MESSAGE = (
    "the restart is deferred: the leak budget is spent, but memory is not growing at present"
)
LIMIT_FAR_MESSAGE = (
    "the restart is deferred: the leak budget is spent, but memory does not reach a known "
    "limit within"
)
MANUALLY_DRAINED_MESSAGE = (
    "a person drained this replica, so it does not restart: run plimsoll resume POD to allow "
    "restarts"
)
WITHDRAWN_STEP = "PodReplaceWithdrawn"


def confirm_incident(context: TurnContext, incident: Incident) -> None:
    """Confirm the incident, which allows the actions of the ladder."""
    incident.confirmed_at = context.now
    context.enter_phase(incident, IncidentPhase.CONFIRMED)
    context.emit_event(EventType.CONFIRMED, incident)


def escalate(context: TurnContext, incident: Incident, message: str) -> None:
    """Mark the current rung as tried, and let the incident continue with the next rung."""
    if incident.rung is not None:
        incident.tried.append(incident.rung)
    incident.rung, incident.escalated, incident.message = None, True, message
    context.enter_phase(incident, IncidentPhase.CONFIRMED)


def request_replacement(context: TurnContext, incident: Incident) -> None:
    """Ask the operator to evict the pod, by a step in the incident's timeline."""
    incident.tried.append(Action.POD_REPLACE)
    text = "the supervisor waits for the operator to evict the pod"
    step = context.make_step(Action.POD_REPLACE.value, StepOutcome.REQUESTED, text)
    step.before_bytes = incident.before_bytes
    incident.add_step(step)


def defer_if_manually_drained(context: TurnContext, incident: Incident) -> bool:
    """Report whether a person has drained the replica, and withdraw the restart if so."""
    if not context.engine.manually_drained:
        return False
    if incident.phase in (IncidentPhase.DRAINING, IncidentPhase.RESTARTING):
        restart_budget.withdraw_restart(context.state.restarts, incident.fenced_epoch or "")
    if incident.phase is not IncidentPhase.CONFIRMED:
        newest = incident.timeline[-1] if incident.timeline else None
        if newest is not None and newest.outcome is StepOutcome.REQUESTED:
            incident.tried.remove(Action.POD_REPLACE)
            incident.add_step(
                context.make_step(WITHDRAWN_STEP, StepOutcome.SUCCEEDED, MANUALLY_DRAINED_MESSAGE)
            )
        incident.rung = None
        context.enter_phase(incident, IncidentPhase.CONFIRMED)
    set_wait_reason(context, incident, WaitReason.MANUALLY_DRAINED, MANUALLY_DRAINED_MESSAGE)
    return True


def set_wait_reason(
    context: TurnContext, incident: Incident, reason: WaitReason | None, message: str
) -> bool:
    """Store why the incident waits, and report whether the reason or the message has changed."""
    if (incident.waits, incident.message) == (reason, message):
        return False
    incident.waits, incident.message = reason, message
    context.emit_event(EventType.ADVANCED, incident)
    return True


def return_to_confirmed(context: TurnContext, incident: Incident, message: str) -> None:
    """Count a refusal. Retry the rung, or end the incident after ``MAX_REFUSALS`` refusals."""
    incident.refusals += 1
    incident.rung = None
    if incident.refusals >= MAX_REFUSALS:
        context.end_incident(incident, IncidentPhase.UNRESOLVED, Reason.REFUSED, message)
    else:
        context.enter_phase(incident, IncidentPhase.CONFIRMED)


def stop_restarting(context: TurnContext, incident: Incident) -> None:
    """End the incident, and allow no restart until a person resets the restart budget.

    A planned restart only ends its own incident, because restarts for leaks must remain possible.
    """
    if incident.kind is IncidentKind.RECYCLE:
        context.end_incident(
            incident,
            IncidentPhase.RESOLVED,
            Reason.CLEARED,
            "the restart budget allows no planned restart",
        )
        return
    context.state.exhausted = True
    context.end_incident(
        incident, IncidentPhase.UNRESOLVED, Reason.RESTART_BUDGET_EXHAUSTED, EXHAUSTED_MESSAGE
    )


def end_if_not_suspected(context: TurnContext, incident: Incident) -> bool:
    """End the incident after a round without a suspicion, and report whether it ended."""
    if incident.escalated or incident.missed_s < ROUND_DURATION_S:
        return False
    returned = max(0, incident.growth_at_trim - context.get_growth_bytes(incident))
    if incident.trimmed and returned * 2 >= incident.growth_at_trim > 0:
        incident.returned_bytes = returned
        message = f"the trim freed {format_bytes(returned)}"
        context.end_incident(incident, IncidentPhase.RESOLVED, Reason.TRIM, message)
    elif incident.trimmed and incident.kind is IncidentKind.CAPACITY_LOSS:
        context.end_incident(
            incident, IncidentPhase.RESOLVED, Reason.TRIM, "the trim restored the capacity"
        )
    else:
        message = "the supervisor no longer suspects the problem"
        context.end_incident(incident, IncidentPhase.RESOLVED, Reason.CLEARED, message)
    return True


def end_if_memory_was_freed(context: TurnContext, incident: Incident) -> bool:
    """End the incident if its memory has been freed since, and report whether it ended.

    Each restart gives the detector a new baseline, so memory is compared with its size before the
    first restart.
    """
    if not incident.escalated or incident.missed_s < ROUND_DURATION_S:
        return False
    budget, before, base = (
        incident.get_budget_state(context.assessment),
        incident.before_bytes,
        incident.baseline_bytes,
    )  # fmt: skip
    if before is not None and base is not None:
        if budget is None or budget.current is None:
            return False
        returned = before - (budget.current - (budget.explained or 0))
        if returned < MIN_CURED_SHARE * max(before - base, 1):
            return False
        incident.returned_bytes = returned
    elif not context.engine.answers:
        return False
    text = "the problem disappeared while the incident waited for a new pod"
    context.end_incident(incident, IncidentPhase.RESOLVED, Reason.CLEARED, text)
    return True


def collect_diagnostics(context: TurnContext, incident: Incident) -> bool:
    """Collect diagnostics once per incident. Return False while the collection runs.

    The collection slows the engine, so call this only before a restart.
    """
    if incident.kind is IncidentKind.RECYCLE:
        return True
    if incident.diagnosed or context.hold or context.explain_why_observing(incident) is not None:
        return True
    if context.has_no_pending_command:
        context.set_pending_command(incident, Verb.DIAGNOSE, "Diagnostics")
    return False


def must_wait_for_window(context: TurnContext, incident: Incident) -> bool:
    """Report whether a restart must wait for the maintenance window.

    A restart for a stall does not wait, nor does a restart for memory that may reach its limit
    before the window.
    """
    window, left = context.policy.maintenance_window, context.estimate_time_to_limit_s(incident)
    if window is None or incident.kind is IncidentKind.STALL or left is None:
        return False
    opens_s = window.compute_seconds_until_open(context.now)
    if not opens_s or left <= opens_s + context.policy.drain.deadline_s:
        return False
    message = f"the restart waits for the maintenance window at {window.opens_at}"
    if set_wait_reason(context, incident, WaitReason.MAINTENANCE_WINDOW, message):
        incident.add_step(context.make_step("MaintenanceWindow", StepOutcome.SKIPPED, message))
    return True


def defer_restart(context: TurnContext, incident: Incident) -> None:
    """Store the reason why a confirmed incident causes no restart at present."""
    if incident.has_subsided:
        if incident.waits is not WaitReason.SUBSIDED:  # the probability changes with every sample
            chance = incident.attribution.confidence
            message = (
                (
                    "the restart is deferred: the probability of a leak has decreased to "
                    f"{chance:.0%}"
                )
                if chance < SUBSIDED_PROBABILITY
                else (
                    f"the restart is deferred: memory has not grown for {SUBSIDED_AFTER_S:.0f} "
                    f"s, and the probability of a leak is {chance:.0%}"
                )
            )
            set_wait_reason(context, incident, WaitReason.SUBSIDED, message)
        return
    suspicion = context.suspicions.get(incident.kind)
    spent = suspicion is not None and suspicion.over_budget
    message = NOT_GROWING_MESSAGE if spent else WITHIN_BUDGET_MESSAGE
    if suspicion is not None and spent and suspicion.growing:
        within_s = context.memory.auto.limit_within_s
        message = f"{LIMIT_FAR_MESSAGE} {format_duration(within_s)} (spec.memory.auto.limitWithin)"
    if incident.kind is IncidentKind.CAPACITY_LOSS:
        message = (
            f"the restart is deferred until {MIN_LOSS_RATIO_FOR_RESTART:.0%} of the capacity "
            "is lost"
        )
    set_wait_reason(context, incident, None, message)


def release_slot(context: TurnContext) -> None:
    """Store that no incident holds the slot, so that the actuator releases the Lease.

    The incident pauses before its next request, so that another replica can take the slot.
    """
    for incident in context.state.incidents:
        if incident.name == context.state.slot_holder:
            incident.retry_at = context.now + SLOT_RETRY_INTERVAL_S
    context.state.slot_holder = None
    context.turn.changed = True


def abandon_trim(context: TurnContext) -> None:
    """Stop waiting for a pending trim of a stalled engine, so that the engine can be restarted."""
    pending = context.state.pending
    if pending is None or pending.verb is not Verb.TRIM:
        return
    context.state.pending, context.turn.changed = None, True
    for other in context.state.incidents:
        for step in other.timeline:
            if step.operation_id == pending.operation_id:
                step.outcome, step.finished_at = StepOutcome.UNKNOWN, context.now
                step.message = "the engine stalled before it returned a result"


def judge_trim(context: TurnContext, incident: Incident) -> None:
    """Set the outcome of a trim from the memory in use, one round after the trim."""
    step = next((s for s in incident.timeline if is_unmeasured_trim(s)), None)
    if step is None:
        return
    step.after_bytes = context.get_current_bytes(incident)
    if step.before_bytes is None or step.after_bytes is None:
        step.outcome = StepOutcome.UNKNOWN
    else:
        returned = step.before_bytes - step.after_bytes
        enough = returned >= MIN_TRIMMED_SHARE * incident.growth_at_trim
        step.outcome = StepOutcome.SUCCEEDED if enough else StepOutcome.FAILED
        if not enough:
            text = f"the trim freed only {format_bytes(max(0, returned))}, which is too little"
            step.message = "; ".join(filter(None, (step.message, text)))
    context.emit_event(EventType.ADVANCED, incident)


def is_unmeasured_trim(step: StepRecord) -> bool:
    """Report whether the step is a finished trim that has not been measured yet."""
    ended = step.outcome is StepOutcome.BEGUN and step.finished_at is not None
    return ended and step.step == Action.TRIM.value


def apply_result(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Apply the result of ``command`` to its incident."""
    for step in incident.timeline:
        if step.operation_id == command.operation_id:
            step.outcome, step.message = StepOutcome(result.outcome.value), result.message
            step.finished_at = context.now
            if command.verb is Verb.TRIM and _has_measurable_effect(step, result):
                step.outcome = StepOutcome.BEGUN
            elif command.verb is not Verb.RESTART_ENGINE:
                step.after_bytes = context.get_current_bytes(incident)
    incident.diagnostics.extend(result.diagnostics)
    ok = result.outcome is Outcome.SUCCEEDED
    if command.verb not in (Verb.TAKE_SLOT, Verb.MEET_PARTNER):
        context.emit_event(EventType.ADVANCED, incident)
    match command.verb:
        case Verb.DIAGNOSE:
            incident.diagnosed = True
        case Verb.TRIM:
            # The adapter may not know how much memory was freed. Only a measurement shows that.
            incident.trimmed = ok or result.outcome is Outcome.UNKNOWN
            incident.seen_s, incident.missed_s = 0.0, 0.0
        case Verb.TAKE_SLOT:
            apply_slot_result(context, incident, command, result)
        case Verb.LEAVE | Verb.DRAIN | Verb.RESTART_WORKER | Verb.RESTART_ENGINE:
            apply_restart_result(context, incident, command, result)
        case Verb.MEET_PARTNER:
            apply_partner_result(context, incident, command, result)


def apply_slot_result(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Apply the result of a request for a restart slot.

    Consecutive refusals for the same reason become one step of the timeline.
    """
    incident.retry_at = context.now + SLOT_RETRY_INTERVAL_S
    merge_repeated_step(context, incident)
    incident.waits, incident.message = result.waits, result.message
    if result.outcome in (Outcome.SUCCEEDED, Outcome.UNKNOWN):
        context.state.slot_holder, incident.slot_at = incident.name, command.at


def apply_partner_result(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Apply the result of a partner test. The partner counts as lost if the last test fails."""
    merge_repeated_step(context, incident)
    incident.retry_at = context.now + SLOT_RETRY_INTERVAL_S
    if result.outcome is Outcome.SUCCEEDED or command.gives_up:
        incident.meets_partner = False
    if command.gives_up and result.outcome is Outcome.FAILED:
        incident.partner_lost = result.message


def merge_repeated_step(context: TurnContext, incident: Incident) -> None:
    """Merge the newest step of the timeline into the previous step if both are alike."""
    newest = incident.timeline[-2:]
    if len({_make_step_key(step) for step in newest}) == len(newest):
        context.emit_event(EventType.ADVANCED, incident)
    else:
        merged = incident.timeline.pop()
        incident.timeline[-1].finished_at = merged.finished_at


def apply_restart_result(
    context: TurnContext, incident: Incident, command: Command, result: Result
) -> None:
    """Apply the result of a command of a restart or of a pod replacement."""
    if incident.phase is IncidentPhase.VERIFYING:
        return
    if context.state.epoch != command.epoch or result.outcome is Outcome.SUCCEEDED:
        incident.meets_partner = command.meets_partner
    if context.state.epoch != command.epoch:
        # The epoch of the command has ended, regardless of the result.
        context.enter_phase(incident, IncidentPhase.VERIFYING)
    elif result.outcome is Outcome.UNKNOWN:
        context.end_incident(incident, IncidentPhase.UNRESOLVED, Reason.EFFECT_UNKNOWN)
    elif result.outcome is Outcome.REFUSED:
        restart_budget.withdraw_restart(context.state.restarts, command.epoch)
        return_to_confirmed(context, incident, result.message)
    elif command.verb in (Verb.LEAVE, Verb.DRAIN) and defer_if_manually_drained(context, incident):
        return
    elif command.verb is Verb.LEAVE:
        context.enter_phase(incident, IncidentPhase.RESTARTING)
        request_replacement(context, incident)
    elif command.verb is Verb.DRAIN:
        # The restart follows even if the drain has failed.
        context.enter_phase(incident, IncidentPhase.RESTARTING)
        context.set_pending_command(incident, Verb.RESTART_ENGINE, Action.ENGINE_RESTART.value)
    elif result.outcome is Outcome.SUCCEEDED:
        context.enter_phase(incident, IncidentPhase.VERIFYING)
    else:
        escalate(context, incident, result.message)


def follow_new_epoch(context: TurnContext, incident: Incident, ended_epoch: str) -> None:
    """Verify the incident in a new epoch that no command for this incident has started."""
    if incident.phase is IncidentPhase.VERIFYING and incident.fenced_epoch == ended_epoch:
        return
    for step in filter(is_unmeasured_trim, incident.timeline):
        step.outcome = StepOutcome.UNKNOWN  # the memory to measure ended with the old epoch
    if incident.phase is not IncidentPhase.VERIFYING:
        incident.rung, incident.fenced_epoch = None, ended_epoch
    incident.warm_at, incident.least_bytes = None, None
    incident.add_step(
        context.make_step(
            "NewEpoch", StepOutcome.SUCCEEDED, "the engine restarted for another reason"
        )
    )
    context.enter_phase(incident, IncidentPhase.VERIFYING)


def _make_step_key(step: StepRecord) -> tuple[str, StepOutcome, str]:
    return step.step, step.outcome, step.message


def _has_measurable_effect(step: StepRecord, result: Result) -> bool:
    return step.before_bytes is not None and result.outcome in (Outcome.SUCCEEDED, Outcome.UNKNOWN)
