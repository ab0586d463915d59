"""What the operator tells a supervisor: one JSON file, mounted from a ConfigMap.

The renderer writes it from an InferenceService, the local mode writes the same file, and the
supervisor reads it again whenever it changes. All sizes are bytes and all times are seconds:
quantities and durations of the manifest were resolved by the renderer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from plimsoll_api.admin import DrainMode

CONFIG_FILE = "supervisor.json"
NODE_IP, EXPORTER_PORT = "NODE_IP", "DCGM_EXPORTER_PORT"
"""Environment of the supervisor's container, where a manifest names the exporter's port."""

PositiveBytes = Annotated[int, msgspec.Meta(gt=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class Mode(StrEnum):
    """``Observe`` records what it would have done; ``Recover`` does it."""

    OBSERVE = "Observe"
    RECOVER = "Recover"


class LogLevel(StrEnum):
    """The least that the supervisor logs."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class Action(StrEnum):
    """A rung of the remediation ladder, lightest first."""

    TRIM = "Trim"
    WORKER_RESTART = "WorkerRestart"
    ENGINE_RESTART = "EngineRestart"
    POD_REPLACE = "PodReplace"


class EngineType(StrEnum):
    """Which engine a replica runs, and so by which verbs it is drained and restarted."""

    PLIMSOLL = "plimsoll"
    VLLM = "vllm"
    SGLANG = "sglang"
    CUSTOM = "custom"


class Budget(msgspec.Struct, frozen=True):
    """Unexplained growth allowed within a window. ``limit_bytes`` is where the kernel kills."""

    growth_bytes: PositiveBytes
    window_s: PositiveSeconds
    limit_bytes: PositiveBytes | None = None


class MemoryPolicy(msgspec.Struct, frozen=True):
    """A budget for host and for device memory; none means: watched, never acted on.

    ``shared_device`` says that other pods use the same devices, so that figures of a whole device
    say nothing of this engine.
    """

    host: Budget | None = None
    device: Budget | None = None
    shared_device: bool = False
    warmup_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0


class RestartBudget(msgspec.Struct, frozen=True):
    """At most ``count`` disruptive actions within ``window_s``; then none until a person resets."""

    count: Annotated[int, msgspec.Meta(ge=0)] = 3
    window_s: PositiveSeconds = 3600.0


class Drain(msgspec.Struct, frozen=True):
    mode: DrainMode = DrainMode.CARRY
    deadline_s: PositiveSeconds = 30.0


class MaintenanceWindow(msgspec.Struct, frozen=True):
    """When restarts that can wait are done: from ``start_s`` after midnight UTC, ``duration_s``.

    ``days`` are the days on which it begins, 0 is Monday; none means every day.
    """

    start_s: Annotated[float, msgspec.Meta(ge=0, lt=86_400)]
    duration_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    days: tuple[Annotated[int, msgspec.Meta(ge=0, le=6)], ...] = ()


class Supervision(msgspec.Struct, frozen=True):
    mode: Mode = Mode.OBSERVE
    ladder: tuple[Action, ...] = (Action.TRIM, Action.WORKER_RESTART, Action.ENGINE_RESTART)
    drain: Drain = Drain()
    restart_budget: RestartBudget = RestartBudget()
    stall_timeout_s: PositiveSeconds = 120.0
    maintenance_window: MaintenanceWindow | None = None
    log_level: LogLevel = LogLevel.INFO


class ServiceRef(msgspec.Struct, frozen=True):
    """The InferenceService this replica belongs to. ``uid`` is empty in local mode."""

    name: str
    namespace: str = "default"
    uid: str = ""


class EngineEndpoint(msgspec.Struct, frozen=True):
    """Where the engine answers: both on the pod's own loopback."""

    type: EngineType
    admin_url: str
    serving_url: str
    model: str = ""
    version: str = ""


class SupervisorConfig(msgspec.Struct, frozen=True):
    """The whole file. ``slots`` names the service's restart-slot Leases, empty in local mode."""

    service: ServiceRef
    engine: EngineEndpoint
    memory: MemoryPolicy = MemoryPolicy()
    supervision: Supervision = Supervision()
    slots: tuple[str, ...] = ()
    sample_interval_s: PositiveSeconds = 1.0


def decode(data: bytes) -> SupervisorConfig:
    """The configuration in ``data``; msgspec.DecodeError names the field that is wrong.

    Fields that are not known are left aside: an upgrade of the operator rolls no pod, so that older
    supervisors read what a newer operator wrote.
    """
    return msgspec.json.decode(data, type=SupervisorConfig)


def encode(config: SupervisorConfig) -> bytes:
    """The same configuration always gives the same bytes, so that a ConfigMap does not flap."""
    return msgspec.json.format(msgspec.json.encode(config, order="sorted"), indent=2) + b"\n"
