"""The life of one incident: what each phase waits for, and what it begins.

One function a phase, found by :data:`PHASES`. A function takes the incident as far as it goes
without waiting for an answer; :mod:`plimsoll_sidecar.govern.moves` takes the answers, and
:mod:`plimsoll_sidecar.govern.incident` says which phase may follow which.
"""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_api.admin import Capability
from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.supervision import Action, Mode
from plimsoll_sidecar.govern import ladder, restart_budget
from plimsoll_sidecar.govern.command import EventType, Verb
from plimsoll_sidecar.govern.context import (
    TurnContext,
    disturbed,
    due,
    engine_starts,
    restart_budget_spent,
    why_not,
)
from plimsoll_sidecar.govern.incident import ROUND_S, Incident
from plimsoll_sidecar.govern.moves import (
    WITHDRAWN,
    confirm,
    diagnosed,
    ended_as_gone,
    ended_as_returned,
    escalate,
    give_up_trim,
    hold_within_budget,
    judge_trim,
    leave_to_person,
    release_slot,
    request_replacement,
    return_to_confirmed,
    stop_restarting,
    waits_for_window,
)
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import CONFIRM_S, SLOT_WAIT_S
from plimsoll_sidecar.govern.verification import Verdict, verdict

RESTART = {
    Action.WORKER_RESTART: Verb.RESTART_WORKER,
    Action.ENGINE_RESTART: Verb.RESTART_ENGINE,
}
TAKE_SLOT = "TakeSlot"


def advance(context: TurnContext, incident: Incident) -> None:
    """Take the incident as far as it goes without waiting for an answer."""
    pending = context.state.pending
    if pending is not None and pending.incident == incident.name:
        return
    PHASES[incident.phase](context, incident)


def interrupted(context: TurnContext, incident: Incident) -> None:
    """Nothing of ours is under way: the command was lost with an old journal."""
    return_to_confirmed(context, incident, "interrupted")


def restarting(context: TurnContext, incident: Incident) -> None:
    """Wait for the operator where the pod is replaced; another restart has a pending command."""
    if incident.rung is Action.POD_REPLACE:
        replacing(context, incident)
    else:
        interrupted(context, incident)


def ended(context: TurnContext, incident: Incident) -> None:
    """Do nothing more."""


def watch(context: TurnContext, incident: Incident) -> None:
    """Suspected: save diagnostics, then trim if that may help.

    Until growth is confirmed or gone.
    """
    if ended_as_gone(context, incident) or incident.seen_s < ROUND_S:
        return
    if incident.kind is IncidentKind.STALL:
        give_up_trim(context)
        confirm(context, incident)
        return
    if context.assessment.in_long_step:
        return  # an engine that makes no step cannot trim, and would never answer
    skipped = why_not(context, Action.TRIM, incident)
    if skipped is None and not context.free:
        return
    incident.growth_at_trim = incident.growth_bytes
    context.enter(incident, IncidentPhase.TRIMMING)
    if skipped is None:
        incident.before_bytes = context.current(incident)
        context.emit(EventType.REMEDIATION, incident, Action.TRIM)
        context.send(incident, Verb.TRIM, Action.TRIM.value)
    else:
        incident.note(context.step(Action.TRIM.value, *skipped))


def trimming(context: TurnContext, incident: Incident) -> None:
    """Suspected, after a trim: confirm if the growth came back or stayed, clear if it is gone."""
    if incident.seen_s + incident.missed_s >= ROUND_S:
        judge_trim(context, incident)
    if ended_as_gone(context, incident) or incident.seen_s < CONFIRM_S:
        return
    if incident.trimmed and incident.growth_bytes * 2 < incident.growth_at_trim:
        # The trim returned most of it: what is left must be confirmed again.
        incident.growth_at_trim, incident.seen_s = incident.growth_bytes, 0.0
        return
    if not incident.unconfirmed:
        confirm(context, incident)


def confirmed(context: TurnContext, incident: Incident) -> None:
    """Choose the next rung, wait for the budget to be spent, or end as unresolved."""
    if ended_as_gone(context, incident):
        return
    if not due(context, incident):
        hold_within_budget(context, incident)
        return
    if not diagnosed(context, incident):
        return
    rung = ladder.next_rung(incident, context.policy, context.engine)
    if rung is None:
        context.end(incident, IncidentPhase.UNRESOLVED, Reason.LADDER_EXHAUSTED)
    elif (observes := context.only_observes(incident)) is not None:
        incident.note(context.step(rung.value, StepOutcome.WOULD, observes))
        context.end(incident, IncidentPhase.SUPPRESSED, Reason.OBSERVED)
    elif leave_to_person(context, incident):
        return
    elif restart_budget_spent(context):
        stop_restarting(context, incident)
    elif waits_for_window(context, incident):
        return
    elif context.hold is None:
        incident.rung, incident.message = rung, ""
        context.enter(incident, IncidentPhase.AWAITING_SLOT)
        awaiting_slot(context, incident)


def awaiting_slot(context: TurnContext, incident: Incident) -> None:
    """Ask for a slot until there is one; go back if the policy no longer wants this rung."""
    if ended_as_gone(context, incident):
        return
    wanted = ladder.next_rung(incident, context.policy, context.engine)
    if context.only_observes(incident) is not None or incident.rung != wanted:
        context.enter(incident, IncidentPhase.CONFIRMED)
    elif leave_to_person(context, incident):
        return
    elif restart_budget_spent(context):
        stop_restarting(context, incident)
    elif context.now - incident.phase_since > SLOT_WAIT_S:
        waits = incident.waits
        context.end(incident, IncidentPhase.UNRESOLVED, Reason.SLOT_TIMEOUT, incident.message)
        incident.waits = waits
    elif (
        disturbed(context, incident)
        or context.hold
        or not context.free
        or engine_starts(context, incident)
    ):
        return
    elif context.state.slot_holder != incident.name:
        if context.now >= incident.retry_at:
            context.send(incident, Verb.TAKE_SLOT, TAKE_SLOT)
    elif not due(context, incident):
        context.enter(incident, IncidentPhase.CONFIRMED)  # it stopped growing while it waited
    else:
        begin_rung(context, incident)


def begin_rung(context: TurnContext, incident: Incident) -> None:
    """Send the first disruptive command of a rung; count the restart before it is sent."""
    assert incident.rung is not None
    assert context.state.epoch is not None
    incident.fenced_epoch, incident.warm_at, incident.least_bytes = context.state.epoch, None, None
    if not incident.escalated:
        incident.before_bytes = context.current(incident) or incident.before_bytes
    serves = (
        incident.kind is not IncidentKind.STALL
        and context.engine.answers
        and Capability.DRAIN in context.engine.capabilities
    )
    replaces = incident.rung is Action.POD_REPLACE
    drains = serves and incident.rung is Action.ENGINE_RESTART
    leaves = serves and replaces and context.engine.abrupt
    first = drains or leaves
    context.enter(incident, IncidentPhase.DRAINING if first else IncidentPhase.RESTARTING)
    context.emit(EventType.REMEDIATION, incident, incident.rung)
    operation: str | None = None
    if leaves:
        operation = context.send(incident, Verb.LEAVE, "Drain").operation_id
    elif replaces:
        request_replacement(context, incident)
    elif drains:
        operation = context.send(incident, Verb.DRAIN, "Drain").operation_id
    else:
        verb = RESTART[incident.rung]
        operation = context.send(incident, verb, incident.rung.value).operation_id
    restart_budget.record(
        context.state.restarts,
        # As the slot's Lease counts it: the same restart is never counted twice.
        Restart(
            at=incident.slot_at or context.now,
            epoch=incident.fenced_epoch,
            operation_id=operation,
        ),
        context.policy.restart_budget,
    )
    incident.slot_at = None


def replacing(context: TurnContext, incident: Incident) -> None:
    """Wait for the request that stands in the incident; the operator may be away.

    A slot is not kept for longer than others would wait for it: the disruption budget of the
    eviction holds all the same.
    """
    if context.policy.mode is Mode.OBSERVE or Action.POD_REPLACE not in context.policy.ladder:
        restart_budget.withdraw(context.state.restarts, incident.fenced_epoch or "")
        incident.note(context.step(WITHDRAWN, StepOutcome.SUCCEEDED, "no longer allowed"))
        return_to_confirmed(context, incident, "no longer allowed")
        return
    if ended_as_gone(context, incident) or ended_as_returned(context, incident):
        return
    if leave_to_person(context, incident):
        return
    late = context.now - incident.phase_since > SLOT_WAIT_S
    holds = context.state.slot_holder == incident.name
    if late and holds:
        release_slot(context)


def verifying(context: TurnContext, incident: Incident) -> None:
    """Judge the restart once the new epoch is warm: cured, try the next rung, or wait on."""
    starts, warmup_s = context.state.starts, context.memory.warmup_s
    answer = verdict(incident, context.assessment, context.engine, starts, warmup_s, context.now)
    if answer is Verdict.WAIT:
        return
    if answer is not Verdict.CURED:
        starts.forget()
    for step in incident.timeline[::-1]:
        if step.step == Action.ENGINE_RESTART.value and step.finished_at is not None:
            # Memory of a process that has ended says nothing: this is its successor's.
            step.after_bytes = incident.least_bytes
            break
    if answer is Verdict.CURED:
        cause = Reason(incident.rung.value) if incident.rung else Reason.NEW_EPOCH
        context.end(incident, IncidentPhase.RESOLVED, cause)
    elif answer is Verdict.PARTLY or incident.rung is None:
        context.end(incident, IncidentPhase.UNRESOLVED, Reason.PARTLY_RETURNED)
    else:
        escalate(context, incident, "returned less than half of the growth")


PHASES: dict[IncidentPhase, Callable[[TurnContext, Incident], None]] = {
    IncidentPhase.OPEN: watch,
    IncidentPhase.TRIMMING: trimming,
    IncidentPhase.CONFIRMED: confirmed,
    IncidentPhase.AWAITING_SLOT: awaiting_slot,
    IncidentPhase.DRAINING: interrupted,
    IncidentPhase.RESTARTING: restarting,
    IncidentPhase.VERIFYING: verifying,
    IncidentPhase.RESOLVED: ended,
    IncidentPhase.SUPPRESSED: ended,
    IncidentPhase.UNRESOLVED: ended,
}
