"""Decide when a healthy engine is due for a planned restart because of its age (recycling).

A planned restart is an incident, which gives it slots, the restart budget and the verification.
"""

from __future__ import annotations

from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.units import format_duration
from plimsoll_sidecar.govern.context import TurnContext, is_restart_budget_spent


def find_recycle_suspicion(context: TurnContext, idle_s: float) -> Suspicion | None:
    """Return a suspicion if a planned restart is due now; None otherwise.

    ``idle_s`` is the time in seconds for which the engine has had no request.
    """
    policy, engine, state = context.policy.recycle, context.engine, context.state
    if policy is None or state.epoch_at is None or engine.state is not EngineState.SERVING:
        return None
    troubled = any(incident.kind is not IncidentKind.RECYCLE for incident in state.incidents)
    if troubled or engine.manually_drained or is_restart_budget_spent(context):
        return None
    age_s = context.now - state.epoch_at
    if age_s < policy.max_age_s or idle_s < (policy.when_idle_for_s or 0.0):
        return None
    window = policy.window or context.policy.maintenance_window
    if window is not None and window.compute_seconds_until_open(context.now):
        return None
    evidence = [
        f"the engine has run for longer than recycle.maxAge ({format_duration(policy.max_age_s)})"
    ]
    if policy.when_idle_for_s is not None:
        idle = format_duration(policy.when_idle_for_s)
        evidence.append(f"the engine has had no request for at least {idle} (recycle.whenIdleFor)")
    return Suspicion(
        kind=IncidentKind.RECYCLE,
        segment=None,
        confidence=1.0,
        consumed_ratio=age_s / policy.max_age_s,
        over_budget=True,
        growing=False,
        evidence=evidence,
    )
