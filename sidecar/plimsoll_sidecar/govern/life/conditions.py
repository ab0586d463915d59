"""Conditions that an incident must meet before something is done about it. They change nothing."""

from __future__ import annotations

from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Segment
from plimsoll_api.incident_record import StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.supervision import Action, Mode
from plimsoll_sidecar.govern.incident import DISRUPTING, Incident
from plimsoll_sidecar.govern.life.context import TurnContext
from plimsoll_sidecar.govern.policy import ladder, restart_budget

EXHAUSTED = (
    "the restart budget is spent; no further action until you reset it with plimsoll resume POD"
)


def certain(context: TurnContext, kind: IncidentKind) -> bool:
    """Whether the absence of a suspicion means that all is well, not that nothing is known."""
    return context.engine.answers and (kind is IncidentKind.STALL or context.assessment.warm)


def why_not(
    context: TurnContext, action: Action, incident: Incident
) -> tuple[StepOutcome, str] | None:
    """Why ``action`` is not taken for this incident now, as the step's outcome; None if it is.

    ``Would``: only the mode prevents it.
    """
    reason = ladder.why_not(
        action,
        incident.kind,
        _owner(incident),
        context.policy.ladder,
        context.engine,
        context.policy.sweep_shared_memory,
        incident.attribution.pod,
    )
    if reason is None and context.policy.mode is Mode.OBSERVE:
        return StepOutcome.WOULD, "mode is Observe"
    if reason is None and context.state.exhausted:
        reason = EXHAUSTED
    reason = reason or context.hold
    return None if reason is None else (StepOutcome.SKIPPED, reason)


def next_rung(context: TurnContext, incident: Incident) -> Action | None:
    """Return the lightest disruptive action that the policy allows and that was not tried.

    None if none is left.
    """
    return ladder.next_disruptive(
        incident.kind,
        _owner(incident),
        incident.tried,
        context.policy.ladder,
        context.engine,
        context.policy.sweep_shared_memory,
        incident.attribution.pod,
    )


def due(context: TurnContext, incident: Incident) -> bool:
    """Return whether the budget is spent, or the memory ends before a careful drain could.

    The budget is what a replica may gain, so its end alone is no reason to hurry: what looks like a
    leak and stops within it costs no restart. What a drain adds beyond it is the memory limit's.
    """
    if incident.kind is IncidentKind.STALL:
        return True
    suspicion = context.suspicions.get(incident.kind)
    return suspicion is not None and (
        suspicion.over_budget or context.exhausts_before_drain(incident)
    )


def restart_budget_spent(context: TurnContext) -> bool:
    """Whether the replica may restart no more, by count or because it was stopped before."""
    left = restart_budget.remaining(
        context.state.restarts, context.policy.restart_budget, context.now
    )
    return context.state.exhausted or left == 0


def disturbed(context: TurnContext, incident: Incident) -> bool:
    """Whether another incident's restart is under way.

    It is over with the new epoch: what is left of it only looks. A pod that waits to be replaced
    may be helped meanwhile, for its operator can be away.
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


def engine_starts(context: TurnContext, incident: Incident) -> bool:
    """Return whether the engine starts: one that does is not restarted for its memory.

    It would never get further.
    """
    starting = (EngineState.STARTING, EngineState.WARMING)
    return incident.kind is not IncidentKind.STALL and context.engine.state in starting


def _owner(incident: Incident) -> str | None:
    """Return the role of the process that holds the memory, or the segment where none does."""
    attribution = incident.attribution
    orphaned = attribution.segment == Segment.SHARED_ORPHAN
    return attribution.segment if orphaned else attribution.process
