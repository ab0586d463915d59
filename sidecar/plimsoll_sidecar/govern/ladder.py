"""Choose the rungs of the remediation ladder that an incident may use, and explain the others.

This module also decides whether the engine should prepare a standby worker.
"""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_api.admin import Capability, Role
from plimsoll_api.assessment import Segment
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.incident import Incident

REQUIRED_CAPABILITIES = {
    Action.TRIM: Capability.TRIM,
    Action.WORKER_RESTART: Capability.RESTART_WORKER,
    Action.ENGINE_RESTART: Capability.RESTART_ENGINE,
}
NO_PODS_MESSAGE = "pods can be replaced only in a cluster"
CURABLE_KINDS = frozenset(
    {
        IncidentKind.HOST_GROWTH,
        IncidentKind.DEVICE_GROWTH,
        IncidentKind.STALL,
        IncidentKind.CAPACITY_LOSS,
        IncidentKind.RECYCLE,
    }
)
"""Kinds on which the supervisor acts. The others are reported only."""


def find_skip_reason(
    action: Action, incident: Incident, policy: Supervision, engine: EngineView
) -> str | None:
    """Return the reason for skipping this rung, for the timeline; None if it is allowed.

    A new worker frees only the worker's memory. Memory that outlives the container needs a new pod,
    unless the supervisor sweeps it between two engines. An engine that does not answer can still be
    restarted by signals, and its pod replaced. A restart of the multi-node group frees the memory
    of all its pods.
    """
    kind, owner, pod = incident.kind, incident.owner, incident.attribution.pod
    if action not in policy.ladder:
        return "the action is not in spec.supervision.ladder"
    if _needs_another_pod(kind, policy) and action is Action.POD_REPLACE:
        return None if engine.replaceable else NO_PODS_MESSAGE
    if kind not in CURABLE_KINDS:
        return f"no action of the supervisor cures {kind.value}"
    if action is Action.POD_REPLACE:
        return None if engine.replaceable else NO_PODS_MESSAGE
    if pod is not None and action in (Action.TRIM, Action.WORKER_RESTART):
        return (
            f"pod {pod} of the group holds the memory, which only a restart of the group releases"
        )
    swept = policy.sweep_shared_memory and action is Action.ENGINE_RESTART
    if owner == Segment.SHARED_ORPHAN and not swept:
        return "no process holds this shared memory, which only a new pod releases"
    if action is Action.ENGINE_RESTART and not engine.answers:
        return None
    if REQUIRED_CAPABILITIES[action] not in engine.capabilities:
        return "the engine does not support this action"
    if action is Action.WORKER_RESTART and owner == Role.FRONTEND:
        return "the frontend holds the memory, which a new worker would not release"
    if not engine.answers:
        return "the engine's frontend does not answer"
    return None


def _needs_another_pod(kind: IncidentKind, policy: Supervision) -> bool:
    """Report whether the start gate replaces the pod if its devices stay in use."""
    gate = policy.start_gate
    return kind is IncidentKind.ORPHAN_DEVICE_MEMORY and gate is not None and gate.then is not None


def choose_next_rung(incident: Incident, policy: Supervision, engine: EngineView) -> Action | None:
    """Return the least disruptive allowed action that was not tried yet; None if there is none."""
    for action in (Action.WORKER_RESTART, Action.ENGINE_RESTART, Action.POD_REPLACE):
        if (
            action not in incident.tried
            and find_skip_reason(action, incident, policy, engine) is None
        ):
            return action
    return None


PHASES_BEFORE_RESTART = frozenset(
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
    """Report whether an incident is restarting the worker, or may do so soon.

    False if the engine supports no standby, or if no restart is allowed.
    """
    if Capability.STANDBY not in engine.capabilities:
        return False
    if policy.mode is Mode.OBSERVE or exhausted:
        return False
    return any(_may_restart_worker(incident, policy, engine) for incident in incidents)


def _may_restart_worker(incident: Incident, policy: Supervision, engine: EngineView) -> bool:
    if incident.phase is IncidentPhase.RESTARTING:
        # The pending restart uses the standby. In the next epoch, the worker is new, even if the
        # result of the command is not known yet.
        return incident.rung is Action.WORKER_RESTART and engine.epoch == incident.fenced_epoch
    return (
        incident.phase in PHASES_BEFORE_RESTART
        and choose_next_rung(incident, policy, engine) is Action.WORKER_RESTART
    )
