"""Handle each phase of an incident, with the functions in :data:`PHASE_HANDLERS`.

A handler advances the incident until it needs the result of a command.
:mod:`plimsoll_sidecar.govern.moves` applies the results, and
:mod:`plimsoll_sidecar.govern.incident` defines the order of the phases.
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
    is_disrupted,
    is_engine_starting,
    is_restart_budget_spent,
    is_restart_due,
)
from plimsoll_sidecar.govern.incident import ROUND_S, Incident
from plimsoll_sidecar.govern.moves import (
    WITHDRAWN_STEP,
    abandon_trim,
    collect_diagnostics,
    confirm,
    defer_restart,
    defer_to_person,
    end_if_gone,
    end_if_memory_was_freed,
    escalate,
    judge_trim,
    release_slot,
    request_replacement,
    return_to_confirmed,
    stop_restarting,
    waits_for_window,
)
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import CONFIRM_S, PARTNER_TEST_S, SLOT_WAIT_S
from plimsoll_sidecar.govern.verification import MAX_START_S, Verdict, judge_restart

RESTART_VERBS = {
    Action.WORKER_RESTART: Verb.RESTART_WORKER,
    Action.ENGINE_RESTART: Verb.RESTART_ENGINE,
}
TAKE_SLOT_STEP, PARTNER_TEST_STEP = "TakeSlot", "MeetPartner"
GROUP_STEP = "GroupRestart"
"""Step that precedes the restart of a multi-node group through its leader."""
KINDS_WITHOUT_TRIM = (IncidentKind.STALL, IncidentKind.RECYCLE)
"""Kinds that a trim cannot cure, and that are confirmed without one."""


def advance(context: TurnContext, incident: Incident) -> None:
    """Advance the incident until it needs the result of a command."""
    pending = context.state.pending
    if pending is not None and pending.incident == incident.name:
        return
    PHASE_HANDLERS[incident.phase](context, incident)


def retry_rung(context: TurnContext, incident: Incident) -> None:
    """Try the rung again, because the journal with its pending command was lost."""
    return_to_confirmed(context, incident, "interrupted")


def on_restarting(context: TurnContext, incident: Incident) -> None:
    """Wait for the operator to replace the pod. All other restarts have a pending command."""
    if incident.rung is Action.POD_REPLACE:
        await_replacement(context, incident)
    else:
        retry_rung(context, incident)


def on_ended(context: TurnContext, incident: Incident) -> None:
    """Do nothing: the incident has ended."""


def on_open(context: TurnContext, incident: Incident) -> None:
    """Trim a suspected leak, or confirm a stall or a planned restart."""
    if end_if_gone(context, incident) or incident.seen_s < ROUND_S:
        return
    if incident.kind in KINDS_WITHOUT_TRIM:
        if incident.kind is IncidentKind.STALL:
            abandon_trim(context)
        confirm(context, incident)
        return
    if context.assessment.in_long_step:
        return  # an engine that is executing a step cannot trim
    skipped = find_skip_outcome(context, Action.TRIM, incident)
    if skipped is None and not context.has_no_pending_command:
        return
    incident.growth_at_trim = incident.growth_bytes
    context.enter_phase(incident, IncidentPhase.TRIMMING)
    if skipped is None:
        incident.before_bytes = context.read_current_bytes(incident)
        context.emit_event(EventType.REMEDIATION, incident, Action.TRIM)
        context.set_pending_command(incident, Verb.TRIM, Action.TRIM.value)
    else:
        incident.add_step(context.make_step(Action.TRIM.value, *skipped))


def on_trimming(context: TurnContext, incident: Incident) -> None:
    """Confirm growth that persisted after the trim, or end the incident."""
    if incident.seen_s + incident.missed_s >= ROUND_S:
        judge_trim(context, incident)
    if end_if_gone(context, incident) or incident.seen_s < CONFIRM_S:
        return
    if incident.trimmed and incident.growth_bytes * 2 < incident.growth_at_trim:
        # The trim freed most of the growth. Confirm the rest again.
        incident.growth_at_trim, incident.seen_s = incident.growth_bytes, 0.0
        return
    if not incident.unconfirmed:
        confirm(context, incident)


def on_confirmed(context: TurnContext, incident: Incident) -> None:
    """Choose the next rung, wait until a restart is due, or end the incident."""
    if end_if_gone(context, incident):
        return
    if not is_restart_due(context, incident):
        defer_restart(context, incident)
        return
    if not collect_diagnostics(context, incident):
        return
    rung = ladder.choose_next_rung(incident, context.policy, context.engine)
    if rung is None:
        context.end_incident(incident, IncidentPhase.UNRESOLVED, Reason.LADDER_EXHAUSTED)
    elif (observes := context.explain_observe_only(incident)) is not None:
        incident.add_step(context.make_step(rung.value, StepOutcome.WOULD, observes))
        context.end_incident(incident, IncidentPhase.SUPPRESSED, Reason.OBSERVED)
    elif defer_to_person(context, incident) or end_if_restart_is_blocked(context, incident):
        return
    elif is_restart_budget_spent(context):
        stop_restarting(context, incident)
    elif waits_for_window(context, incident):
        return
    elif context.hold is None:
        incident.rung, incident.message = rung, ""
        context.enter_phase(incident, IncidentPhase.AWAITING_SLOT)
        on_awaiting_slot(context, incident)


def end_if_restart_is_blocked(context: TurnContext, incident: Incident) -> bool:
    """End the incident if a restart would break the engine's partner. Return whether it ended.

    A stalled engine is restarted in any case, because it serves its partner nothing.
    """
    if context.engine.restart_blocker is None or incident.kind is IncidentKind.STALL:
        return False
    context.end_incident(
        incident, IncidentPhase.UNRESOLVED, Reason.REFUSED, context.engine.restart_blocker
    )
    return True


def on_awaiting_slot(context: TurnContext, incident: Incident) -> None:
    """Request a slot until one is free. Return to Confirmed if the policy changed the rung."""
    if end_if_gone(context, incident):
        return
    wanted = ladder.choose_next_rung(incident, context.policy, context.engine)
    if context.explain_observe_only(incident) is not None or incident.rung != wanted:
        context.enter_phase(incident, IncidentPhase.CONFIRMED)
    elif defer_to_person(context, incident):
        return
    elif is_restart_budget_spent(context):
        stop_restarting(context, incident)
    elif (
        incident.kind is not IncidentKind.RECYCLE  # nothing is wrong, so it may wait on
        and context.now - incident.phase_since > SLOT_WAIT_S
    ):
        waits = incident.waits
        context.end_incident(
            incident, IncidentPhase.UNRESOLVED, Reason.SLOT_TIMEOUT, incident.message
        )
        incident.waits = waits
    elif (
        is_disrupted(context, incident)
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
    """Count the restart, and then send the first disruptive command of the rung."""
    assert incident.rung is not None
    assert context.state.epoch is not None
    incident.fenced_epoch, incident.warm_at, incident.least_bytes = context.state.epoch, None, None
    incident.meets_partner, incident.met_since, incident.partner_lost = False, None, ""
    if not incident.escalated:
        incident.before_bytes = context.read_current_bytes(incident) or incident.before_bytes
    serves = (
        incident.kind is not IncidentKind.STALL
        and context.engine.answers
        and Capability.DRAIN in context.engine.capabilities
    )
    replaces = incident.rung is Action.POD_REPLACE
    if context.engine.group and incident.rung is not Action.WORKER_RESTART:
        text = f"one slot and one restart count for all pods of group {context.engine.group}"
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
        # With the time in the slot's Lease, the same restart never counts twice.
        Restart(
            at=incident.slot_at or context.now,
            epoch=incident.fenced_epoch,
            operation_id=operation,
        ),
        context.policy.restart_budget,
    )
    incident.slot_at = None


def await_replacement(context: TurnContext, incident: Incident) -> None:
    """Wait for the operator, which may be down, to evict the pod.

    The slot is released after :data:`SLOT_WAIT_S`, for which other replicas wait at most. The
    eviction respects the disruption budget in any case.
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
    if end_if_gone(context, incident) or end_if_memory_was_freed(context, incident):
        return
    if defer_to_person(context, incident):
        return
    late = context.now - incident.phase_since > SLOT_WAIT_S
    holds = context.state.slot_holder == incident.name
    if late and holds:
        release_slot(context)


def on_verifying(context: TurnContext, incident: Incident) -> None:
    """Judge the restart once the new epoch is warm: resolve, choose the next rung, or wait.

    An engine that serves only together with a partner must first serve a request with the partner.
    """
    if waits_for_partner(context, incident):
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
            # The process that was restarted has ended. This is the memory of its successor.
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


def waits_for_partner(context: TurnContext, incident: Incident) -> bool:
    """Report whether the restarted engine must still serve a request with its partner.

    The supervisor sends such requests for :data:`PARTNER_TEST_S` after the engine starts to serve.
    An engine that does not start in time is judged without them.
    """
    if not incident.meets_partner:
        return False
    longest_s = MAX_START_S + context.memory.warmup_s + PARTNER_TEST_S
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
        late = context.now - incident.met_since >= PARTNER_TEST_S
        context.set_pending_command(incident, Verb.MEET_PARTNER, PARTNER_TEST_STEP, gives_up=late)
    return True


PHASE_HANDLERS: dict[IncidentPhase, Callable[[TurnContext, Incident], None]] = {
    IncidentPhase.OPEN: on_open,
    IncidentPhase.TRIMMING: on_trimming,
    IncidentPhase.CONFIRMED: on_confirmed,
    IncidentPhase.AWAITING_SLOT: on_awaiting_slot,
    IncidentPhase.DRAINING: retry_rung,
    IncidentPhase.RESTARTING: on_restarting,
    IncidentPhase.VERIFYING: on_verifying,
    IncidentPhase.RESOLVED: on_ended,
    IncidentPhase.SUPPRESSED: on_ended,
    IncidentPhase.UNRESOLVED: on_ended,
}
