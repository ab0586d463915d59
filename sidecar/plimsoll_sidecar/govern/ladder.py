"""Choose the action of the remediation ladder for an incident, and explain skipped actions."""

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
"""Kinds on which the supervisor acts. Other kinds are only reported."""


def find_skip_reason(
    action: Action, incident: Incident, policy: Supervision, engine: EngineView
) -> str | None:
    """Return the reason why ``action`` is skipped; None if it is allowed."""
    kind, owner, pod = incident.kind, incident.owner, incident.attribution.pod
    if action not in policy.ladder:
        return "spec.supervision.ladder does not contain this action"
    if _may_replace_pod_for_start_gate(kind, policy) and action is Action.POD_REPLACE:
        return None if engine.replaceable else NO_PODS_MESSAGE
    if kind not in CURABLE_KINDS:
        return f"no action of the supervisor resolves an incident of kind {kind.value}"
    if action is Action.POD_REPLACE:
        return None if engine.replaceable else NO_PODS_MESSAGE
    if _needs_other_device(incident, policy, engine):
        return (
            f"the kubelet reports the device {incident.unhealthy_device} as unhealthy, and only a "
            "new pod can get another device"
        )
    if pod is not None and action in (Action.TRIM, Action.WORKER_RESTART):
        return (
            f"pod {pod} of the group holds the memory, which only a restart of the group releases"
        )
    swept = policy.sweep_shared_memory and action is Action.ENGINE_RESTART
    if owner == Segment.SHARED_ORPHAN and not swept:
        return "no process holds this shared memory, so only a new pod releases it"
    if action is Action.ENGINE_RESTART and not engine.answers:
        return None
    if REQUIRED_CAPABILITIES[action] not in engine.capabilities:
        return "the engine does not support this action"
    if action is Action.WORKER_RESTART and owner == Role.FRONTEND:
        return "the frontend holds the memory, so a new worker would not release it"
    if not engine.answers:
        return "the frontend of the engine does not answer"
    return None


def _needs_other_device(incident: Incident, policy: Supervision, engine: EngineView) -> bool:
    # If the pod cannot be replaced, a restart is better than no action. A stall does not wait for a
    # new pod.
    return (
        incident.kind is IncidentKind.DEVICE_GROWTH
        and incident.unhealthy_device is not None
        and Action.POD_REPLACE in policy.ladder
        and engine.replaceable
    )


def _may_replace_pod_for_start_gate(kind: IncidentKind, policy: Supervision) -> bool:
    gate = policy.start_gate
    return kind is IncidentKind.ORPHAN_DEVICE_MEMORY and gate is not None and gate.then is not None


def choose_next_rung(incident: Incident, policy: Supervision, engine: EngineView) -> Action | None:
    """Return the least disruptive allowed rung that was not tried yet; None if none is left."""
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


def should_prepare_standby(
    incidents: Iterable[Incident],
    policy: Supervision,
    engine: EngineView,
    is_budget_exhausted: bool,
) -> bool:
    """Report whether the worker is restarted for an incident, or may soon be."""
    if Capability.STANDBY not in engine.capabilities:
        return False
    if policy.mode is Mode.OBSERVE or is_budget_exhausted:
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
