"""Kinds and phases of incidents."""

from __future__ import annotations

from plimsoll_api.open_enum import OpenEnum


class IncidentKind(OpenEnum):
    """Kind of an incident: a problem, a planned restart (``Recycle``) or an action by a person."""

    HOST_GROWTH = "HostGrowth"
    DEVICE_GROWTH = "DeviceGrowth"
    ORPHAN_DEVICE_MEMORY = "OrphanDeviceMemory"
    STALL = "Stall"
    OUT_OF_MEMORY_KILL = "OutOfMemoryKill"
    CAPACITY_LOSS = "CapacityLoss"
    ENGINE_CRASH = "EngineCrash"
    CRASH_LOOP = "CrashLoop"
    RECYCLE = "Recycle"
    MANUAL_ACTION = "ManualAction"


GROWTH_INCIDENT_KINDS = (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH)
"""Kinds of growth that consume a leak budget."""
OPERATOR_ONLY_KINDS = frozenset({IncidentKind.CRASH_LOOP})
"""Kinds that only the operator records, because a supervisor cannot observe them."""


class IncidentPhase(OpenEnum):
    """Phase of an incident; Resolved, Unresolved and Suppressed are final."""

    OPEN = "Open"
    TRIMMING = "Trimming"
    CONFIRMED = "Confirmed"
    AWAITING_SLOT = "AwaitingSlot"
    DRAINING = "Draining"
    RESTARTING = "Restarting"
    VERIFYING = "Verifying"
    RESOLVED = "Resolved"
    UNRESOLVED = "Unresolved"
    SUPPRESSED = "Suppressed"


ENDED_PHASES = frozenset(
    {IncidentPhase.RESOLVED, IncidentPhase.UNRESOLVED, IncidentPhase.SUPPRESSED}
)


class WaitReason(OpenEnum):
    """Reason why the restart of an incident waits (``status.waitingReason``)."""

    SERVICE_RESTART_BUDGET = "ServiceRestartBudgetExhausted"
    REPLICA_RESTART_BUDGET = "ReplicaRestartBudgetExhausted"
    SLOT_HELD = "SlotHeld"
    SLOT_CONFLICT = "SlotConflict"
    NO_SLOT = "NoSlot"
    CIRCUIT_BREAKER = "CircuitBreaker"
    LAST_READY_REPLICA = "LastReadyReplica"
    MAINTENANCE_WINDOW = "MaintenanceWindow"
    MANUALLY_DRAINED = "ManuallyDrained"
    SUBSIDED = "Subsided"
    API_SERVER_UNREACHABLE = "APIServerUnreachable"
    COUNT_UNREADABLE = "RestartCountUnreadable"
