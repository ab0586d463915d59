"""Handle each phase of an incident: trim, confirm, take a slot, restart, verify, end.

Each handler advances the incident until the result of a command is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_api.admin import Capability, EngineState
from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.supervision import Action, Mode
from plimsoll_sidecar.govern import ladder, restart_budget
from plimsoll_sidecar.govern.command import EventType, Verb
from plimsoll_sidecar.govern.context import (
    TurnContext,
    find_skip_outcome,
    is_engine_starting,
    is_other_restart_running,
    is_restart_budget_spent,
    is_restart_due,
)
from plimsoll_sidecar.govern.incident import ROUND_DURATION_S, Incident
from plimsoll_sidecar.govern.phase_steps import (
    WITHDRAWN_STEP,
    abandon_trim,
    collect_diagnostics,
    confirm_incident,
    defer_if_manually_drained,
    defer_restart,
    end_if_memory_was_freed,
    end_if_not_suspected,
    escalate,
    judge_trim,
    must_wait_for_window,
    release_slot,
    request_replacement,
    return_to_confirmed,
    stop_restarting,
)
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import (
    CONFIRMATION_DURATION_S,
    MAX_SLOT_WAIT_S,
    PARTNER_TEST_DURATION_S,
)
from plimsoll_sidecar.govern.verification import MAX_START_DURATION_S, Verdict, judge_restart

RESTART_VERBS = {
    Action.WORKER_RESTART: Verb.RESTART_WORKER,
    Action.ENGINE_RESTART: Verb.RESTART_ENGINE,
}
TAKE_SLOT_STEP, PARTNER_TEST_STEP = "TakeSlot", "MeetPartner"
# The step before a restart of a multi-node group.
GROUP_STEP = "GroupRestart"
# A trim would not help, so these kinds are confirmed without one.
KINDS_WITHOUT_TRIM = (IncidentKind.STALL, IncidentKind.RECYCLE)


def advance(context: TurnContext, incident: Incident) -> None:
    """Advance the incident, unless it waits for the result of a command."""
    pending = context.state.pending
    if pending is not None and pending.incident == incident.name:
        return
    PHASE_HANDLERS[incident.phase](context, incident)


def retry_rung(context: TurnContext, incident: Incident) -> None:
    """Try the rung again after a journal without its pending command was restored."""
    return_to_confirmed(context, incident, "interrupted")


def handle_restarting(context: TurnContext, incident: Incident) -> None:
    """Wait for the operator to replace the pod, or try another rung again."""
    if incident.rung is Action.POD_REPLACE:
        wait_for_replacement(context, incident)
    else:
        retry_rung(context, incident)


def handle_ended(context: TurnContext, incident: Incident) -> None:
    """Do nothing: the incident has ended."""


def handle_open(context: TurnContext, incident: Incident) -> None:
    """Trim the engine for a suspected leak; confirm a stall or a planned restart."""
    if end_if_not_suspected(context, incident) or incident.seen_s < ROUND_DURATION_S:
        return
    if incident.kind in KINDS_WITHOUT_TRIM:
        if incident.kind is IncidentKind.STALL:
            abandon_trim(context)
        confirm_incident(context, incident)
        return
    if context.assessment.in_long_step:
        return  # an engine that is executing a step cannot trim
    skipped = find_skip_outcome(context, Action.TRIM, incident)
    if skipped is None and not context.has_no_pending_command:
        return
    incident.growth_at_trim = incident.growth_bytes
    context.enter_phase(incident, IncidentPhase.TRIMMING)
    if skipped is None:
        incident.before_bytes = context.get_current_bytes(incident)
        context.emit_event(EventType.REMEDIATION, incident, Action.TRIM)
        context.set_pending_command(incident, Verb.TRIM, Action.TRIM.value)
    else:
        incident.add_step(context.make_step(Action.TRIM.value, *skipped))


def handle_trimming(context: TurnContext, incident: Incident) -> None:
    """Judge the trim. Confirm growth that persists after it, or end the incident."""
    if incident.seen_s + incident.missed_s >= ROUND_DURATION_S:
        judge_trim(context, incident)
    if end_if_not_suspected(context, incident) or incident.seen_s < CONFIRMATION_DURATION_S:
        return
    if incident.trimmed and incident.growth_bytes * 2 < incident.growth_at_trim:
        # The trim freed most of the growth. Confirm the rest again.
        incident.growth_at_trim, incident.seen_s = incident.growth_bytes, 0.0
        return
    if not incident.unconfirmed:
        confirm_incident(context, incident)


def handle_confirmed(context: TurnContext, incident: Incident) -> None:
    """Choose the next rung, wait until a restart is due, or end the incident."""
    if end_if_not_suspected(context, incident):
        return
    if not is_restart_due(context, incident):
        defer_restart(context, incident)
        return
    if not collect_diagnostics(context, incident):
        return
    rung = ladder.choose_next_rung(incident, context.policy, context.engine)
    if rung is None:
        context.end_incident(incident, IncidentPhase.UNRESOLVED, Reason.LADDER_EXHAUSTED)
    elif (observes := context.explain_why_observing(incident)) is not None:
        incident.add_step(context.make_step(rung.value, StepOutcome.WOULD, observes))
        context.end_incident(incident, IncidentPhase.SUPPRESSED, Reason.OBSERVED)
    elif defer_if_manually_drained(context, incident) or end_if_restart_is_blocked(
        context, incident
    ):
        return
    elif is_restart_budget_spent(context):
        stop_restarting(context, incident)
    elif must_wait_for_window(context, incident):
        return
    elif context.hold is None:
        incident.rung, incident.message = rung, ""
        context.enter_phase(incident, IncidentPhase.AWAITING_SLOT)
        handle_awaiting_slot(context, incident)


def end_if_restart_is_blocked(context: TurnContext, incident: Incident) -> bool:
    """End the incident if the engine must not restart alone, and report whether it ended.

    A stalled engine is restarted in any case, because it does not serve its partner either.
    """
    if context.engine.restart_blocker is None or incident.kind is IncidentKind.STALL:
        return False
    context.end_incident(
        incident, IncidentPhase.UNRESOLVED, Reason.REFUSED, context.engine.restart_blocker
    )
    return True


def handle_awaiting_slot(context: TurnContext, incident: Incident) -> None:
    """Request a restart slot until one is acquired, and then start the rung."""
    if end_if_not_suspected(context, incident):
        return
    rung = ladder.choose_next_rung(incident, context.policy, context.engine)
    if context.explain_why_observing(incident) is not None or incident.rung != rung:
        context.enter_phase(incident, IncidentPhase.CONFIRMED)
    elif defer_if_manually_drained(context, incident):
        return
    elif is_restart_budget_spent(context):
        stop_restarting(context, incident)
    elif (
        incident.kind is not IncidentKind.RECYCLE  # a planned restart may wait longer
        and context.now - incident.phase_since > MAX_SLOT_WAIT_S
    ):
        waits = incident.waits
        context.end_incident(
            incident, IncidentPhase.UNRESOLVED, Reason.SLOT_TIMEOUT, incident.message
        )
        incident.waits = waits
    elif (
        is_other_restart_running(context, incident)
        or context.hold
        or not context.has_no_pending_command
        or is_engine_starting(context, incident)
    ):
        return
    elif context.state.slot_holder != incident.name:
        if context.now >= incident.retry_at:
            context.set_pending_command(incident, Verb.TAKE_SLOT, TAKE_SLOT_STEP)
    elif not is_restart_due(context, incident):
        context.enter_phase(incident, IncidentPhase.CONFIRMED)  # memory stopped growing meanwhile
    else:
        start_rung(context, incident)


def start_rung(context: TurnContext, incident: Incident) -> None:
    """Count the restart, and create the first disruptive command of the rung."""
    assert incident.rung is not None
    assert context.state.epoch is not None
    incident.fenced_epoch, incident.warm_at, incident.least_bytes = context.state.epoch, None, None
    incident.meets_partner, incident.met_since, incident.partner_lost = False, None, ""
    if not incident.escalated:
        incident.before_bytes = context.get_current_bytes(incident) or incident.before_bytes
    serves = (
        incident.kind is not IncidentKind.STALL
        and context.engine.answers
        and Capability.DRAIN in context.engine.capabilities
    )
    replaces = incident.rung is Action.POD_REPLACE
    if context.engine.group and incident.rung is not Action.WORKER_RESTART:
        text = f"all pods of group {context.engine.group} share one slot, and restart together"
        incident.add_step(context.make_step(GROUP_STEP, StepOutcome.SUCCEEDED, text))
    drains = serves and incident.rung is Action.ENGINE_RESTART
    leaves = serves and replaces and context.engine.abrupt
    first = drains or leaves
    context.enter_phase(incident, IncidentPhase.DRAINING if first else IncidentPhase.RESTARTING)
    context.emit_event(EventType.REMEDIATION, incident, incident.rung)
    operation: str | None = None
    if leaves:
        operation = context.set_pending_command(incident, Verb.LEAVE, "Drain").operation_id
    elif replaces:
        request_replacement(context, incident)
    elif drains:
        operation = context.set_pending_command(incident, Verb.DRAIN, "Drain").operation_id
    else:
        verb = RESTART_VERBS[incident.rung]
        operation = context.set_pending_command(incident, verb, incident.rung.value).operation_id
    restart_budget.record_restart(
        context.state.restarts,
        # The Lease of the slot stores the same time, so the restart does not count twice.
        Restart(
            at=incident.slot_at or context.now,
            epoch=incident.fenced_epoch,
            operation_id=operation,
        ),
        context.policy.restart_budget,
    )
    incident.slot_at = None


def wait_for_replacement(context: TurnContext, incident: Incident) -> None:
    """Wait for the operator to evict the pod.

    After :data:`MAX_SLOT_WAIT_S`, the slot is released for other replicas: the operator may be
    down.
    """
    if context.policy.mode is Mode.OBSERVE or Action.POD_REPLACE not in context.policy.ladder:
        restart_budget.withdraw_restart(context.state.restarts, incident.fenced_epoch or "")
        incident.add_step(
            context.make_step(
                WITHDRAWN_STEP,
                StepOutcome.SUCCEEDED,
                "the policy no longer allows a pod replacement",
            )
        )
        return_to_confirmed(context, incident, "the policy no longer allows a pod replacement")
        return
    if end_if_not_suspected(context, incident) or end_if_memory_was_freed(context, incident):
        return
    if defer_if_manually_drained(context, incident):
        return
    is_late = context.now - incident.phase_since > MAX_SLOT_WAIT_S
    if is_late and context.state.slot_holder == incident.name:
        release_slot(context)


def handle_verifying(context: TurnContext, incident: Incident) -> None:
    """Test the engine with its partner, and judge the effect of the restart."""
    if must_wait_for_partner(context, incident):
        return
    starts, warmup_s = context.state.starts, context.memory.warmup_s
    answer = judge_restart(
        incident, context.assessment, context.engine, starts, warmup_s, context.now
    )
    if answer is Verdict.WAIT:
        return
    if answer is not Verdict.CURED:
        starts.discard_start()
    for step in incident.timeline[::-1]:
        if step.step == Action.ENGINE_RESTART.value and step.finished_at is not None:
            # The restarted process has ended. This is the memory of the process that replaced it.
            step.after_bytes = incident.least_bytes
            break
    if answer is not Verdict.USELESS and incident.partner_lost:
        lost = incident.partner_lost
        context.end_incident(incident, IncidentPhase.UNRESOLVED, Reason.PARTNER_LOST, lost)
    elif answer is Verdict.CURED:
        cause = Reason(incident.rung.value) if incident.rung else Reason.NEW_EPOCH
        context.end_incident(incident, IncidentPhase.RESOLVED, cause)
    elif answer is Verdict.PARTLY or incident.rung is None:
        context.end_incident(incident, IncidentPhase.UNRESOLVED, Reason.PARTLY_RETURNED)
    else:
        escalate(context, incident, "the restart freed less than half of the growth")


def must_wait_for_partner(context: TurnContext, incident: Incident) -> bool:
    """Report whether the engine must still be tested with its partner, and request tests.

    An engine that does not start in time is judged without a test.
    """
    if not incident.meets_partner:
        return False
    longest_s = MAX_START_DURATION_S + context.memory.warmup_s + PARTNER_TEST_DURATION_S
    if context.now - incident.phase_since > longest_s:
        incident.meets_partner, context.turn.changed = False, True
        return False
    engine = context.engine
    renewed = engine.answers and engine.epoch != incident.fenced_epoch
    if not renewed or engine.state is not EngineState.SERVING:
        return True
    if incident.met_since is None:
        incident.met_since, incident.retry_at = context.now, context.now
        context.turn.changed = True
    if context.has_no_pending_command and context.hold is None and context.now >= incident.retry_at:
        late = context.now - incident.met_since >= PARTNER_TEST_DURATION_S
        context.set_pending_command(incident, Verb.MEET_PARTNER, PARTNER_TEST_STEP, gives_up=late)
    return True


PHASE_HANDLERS: dict[IncidentPhase, Callable[[TurnContext, Incident], None]] = {
    IncidentPhase.OPEN: handle_open,
    IncidentPhase.TRIMMING: handle_trimming,
    IncidentPhase.CONFIRMED: handle_confirmed,
    IncidentPhase.AWAITING_SLOT: handle_awaiting_slot,
    IncidentPhase.DRAINING: retry_rung,
    IncidentPhase.RESTARTING: handle_restarting,
    IncidentPhase.VERIFYING: handle_verifying,
    IncidentPhase.RESOLVED: handle_ended,
    IncidentPhase.SUPPRESSED: handle_ended,
    IncidentPhase.UNRESOLVED: handle_ended,
}
