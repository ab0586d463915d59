"""Which rungs of the remediation ladder may be tried for an incident, and why not the others.

Also whether the engine should have a worker prepared for a restart that may come.
"""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_api.admin import Capability, Role
from plimsoll_api.assessment import Segment
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.incident import Incident

NEEDS = {
    Action.TRIM: Capability.TRIM,
    Action.WORKER_RESTART: Capability.RESTART_WORKER,
    Action.ENGINE_RESTART: Capability.RESTART_ENGINE,
}
CURABLE = frozenset(
    {
        IncidentKind.HOST_GROWTH,
        IncidentKind.DEVICE_GROWTH,
        IncidentKind.STALL,
        IncidentKind.CAPACITY_LOSS,
    }
)
"""The others are reported only: the process that held the memory is gone already."""


def why_not(
    action: Action, incident: Incident, policy: Supervision, engine: EngineView
) -> str | None:
    """Why this rung is skipped, in words for the timeline; None when it may be tried.

    A new worker cures the worker's memory only, and what outlives the container needs a new pod,
    unless the supervisor sweeps it between two engines. An engine that does not answer can still be
    restarted by signals, and its pod replaced. What another pod of the multi-node group holds comes
    back with a restart of the group.
    """
    kind, owner, pod = incident.kind, incident.owner, incident.attribution.pod
    if action not in policy.ladder:
        return "not in this service's ladder"
    if kind not in CURABLE:
        return f"no action of the supervisor fixes {kind.value}"
    if action is Action.POD_REPLACE:
        return None if engine.replaceable else "pods can only be replaced in a cluster"
    if pod is not None and action in (Action.TRIM, Action.WORKER_RESTART):
        return f"pod {pod} of the group holds the memory; only a restart of the group releases it"
    swept = policy.sweep_shared_memory and action is Action.ENGINE_RESTART
    if owner == Segment.SHARED_ORPHAN and not swept:
        return "no process holds this shared memory; only a new pod releases it"
    if action is Action.ENGINE_RESTART and not engine.answers:
        return None
    if NEEDS[action] not in engine.capabilities:
        return "the engine does not support it"
    if action is Action.WORKER_RESTART and owner == Role.FRONTEND:
        return "the frontend holds the memory; a new worker would not release it"
    if not engine.answers:
        return "the engine's frontend does not answer"
    return None


def next_rung(incident: Incident, policy: Supervision, engine: EngineView) -> Action | None:
    """Return the lightest disruptive action that is allowed and was not tried; None without one."""
    for action in (Action.WORKER_RESTART, Action.ENGINE_RESTART, Action.POD_REPLACE):
        if action not in incident.tried and why_not(action, incident, policy, engine) is None:
            return action
    return None


BEFORE = frozenset(
    {
        IncidentPhase.OPEN,
        IncidentPhase.TRIMMING,
        IncidentPhase.CONFIRMED,
        IncidentPhase.AWAITING_SLOT,
    }
)
"""Phases of an incident that may still lead to a restart."""


def wants_standby(
    incidents: Iterable[Incident], policy: Supervision, engine: EngineView, exhausted: bool
) -> bool:
    """Whether an incident may lead to a restart of the worker, or does so now.

    Never for an engine that takes no leases, nor where nothing may be restarted.
    """
    if Capability.STANDBY not in engine.capabilities:
        return False
    if policy.mode is Mode.OBSERVE or exhausted:
        return False
    return any(_restarts_worker(incident, policy, engine) for incident in incidents)


def _restarts_worker(incident: Incident, policy: Supervision, engine: EngineView) -> bool:
    if incident.phase is IncidentPhase.RESTARTING:
        # The command may be on its way: the standby is what it is to use. In the next epoch the
        # worker is new, though the answer that says so may still be on its way.
        return incident.rung is Action.WORKER_RESTART and engine.epoch == incident.fenced_epoch
    return incident.phase in BEFORE and next_rung(incident, policy, engine) is Action.WORKER_RESTART
