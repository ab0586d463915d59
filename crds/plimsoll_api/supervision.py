"""``spec.memory`` and ``spec.supervision``, and the supervisor's configuration, which holds them.

The configuration is one JSON file, mounted from a ConfigMap. The renderer writes it from an
InferenceService, local mode writes the same file, and the supervisor reads it again whenever it
changes. All sizes are bytes and all times are seconds. A manifest writes the same fields as
quantities and durations (:mod:`plimsoll_api.manifest`).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec.structs import replace

from plimsoll_api.admin import DrainMode
from plimsoll_api.cel import Rule, rule, validations
from plimsoll_api.manifest import DURATION, POSITIVE_BYTES, POSITIVE_DURATION, FieldForm, written
from plimsoll_api.names import SERVICE_KIND
from plimsoll_api.units import format_bytes
from plimsoll_api.workloads import WorkloadRef, slots_of

CONFIG_FILE = "supervisor.json"
NODE_IP, EXPORTER_PORT = "NODE_IP", "DCGM_EXPORTER_PORT"
AMD_EXPORTER_PORT = "AMD_EXPORTER_PORT"
"""Environment of the supervisor's container, where a manifest names an exporter's port."""

CONTAINER_ENV = "PLIMSOLL_CONTAINER"
"""Environment of the engine's container: its name, by which the supervisor knows its processes."""

POD_ENGINE_ENV = "PLIMSOLL_ENGINE"
"""Environment of the supervisor's container in a pod of a SupervisionPolicy: a
:class:`PodEngine` as JSON. The policy's configuration is
the same for all of its pods; this is what differs."""

PROBE_DIR_ENV = "PLIMSOLL_PROBE_DIR"
"""Environment of both containers: the folder for the sockets of the probes in the engine."""

PositiveBytes = Annotated[int, msgspec.Meta(gt=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
DAY_S = 86_400.0
MAX_SLOTS = 16


class Mode(StrEnum):
    """``Observe`` records what the supervisor would do; ``Recover`` does it."""

    OBSERVE = "Observe"
    RECOVER = "Recover"


class LogLevel(StrEnum):
    """The lowest severity that the supervisor logs."""

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


class Weekday(StrEnum):
    """A day of the week; its place in this list is its number, 0 for Monday."""

    MONDAY = "Monday"
    TUESDAY = "Tuesday"
    WEDNESDAY = "Wednesday"
    THURSDAY = "Thursday"
    FRIDAY = "Friday"
    SATURDAY = "Saturday"
    SUNDAY = "Sunday"


class EngineType(StrEnum):
    """Which engine a replica runs, and so by which verbs it is drained and restarted."""

    PLIMSOLL = "plimsoll"
    VLLM = "vllm"
    SGLANG = "sglang"
    CUSTOM = "custom"


class MemoryBudget(msgspec.Struct, frozen=True):
    """Unexplained growth allowed within a window. ``limit_bytes`` is where the kernel kills."""

    growth_bytes: Annotated[
        PositiveBytes,
        written(
            "Unexplained growth, in bytes, that each replica may show within `window`. Must be more"
            " than 0. To set no budget, omit the enclosing `host` or `device`.",
            rule(
                "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
                "growthBudget must be more than 0; leave host or device out for no budget",
            ),
            name="growthBudget",
            form=POSITIVE_BYTES,
        ),
    ]
    window_s: Annotated[
        PositiveSeconds,
        written(
            "Period over which growth is counted against the budget. Defaults to 24h.",
            name="window",
            form=POSITIVE_DURATION,
        ),
    ] = DAY_S
    limit_bytes: Annotated[
        PositiveBytes | None,
        written(
            "Memory, in bytes, at which the replica is killed. For host memory, defaults to the "
            "engine's memory limit. For device memory, defaults to the size of the device.",
            name="limit",
            form=POSITIVE_BYTES,
        ),
    ] = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        rule(
            "!has(self.limit) || quantity(string(self.growthBudget))"
            ".compareTo(quantity(string(self.limit))) <= 0",
            "growthBudget must not be larger than limit",
            fieldPath=".growthBudget",
        ),
    )

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.growth_bytes > self.limit_bytes:
            raise ValueError(
                f"growthBudget ({format_bytes(self.growth_bytes)}) must not be larger than limit "
                f"({format_bytes(self.limit_bytes)})"
            )


class MemoryPolicy(msgspec.Struct, frozen=True):
    """Budgets for host and for device memory; without one, memory is watched but never acted on."""

    host: Annotated[
        MemoryBudget | None,
        written(
            "Growth budget for host memory. If unset, Plimsoll watches host memory but never acts "
            "on its growth."
        ),
    ] = None
    device: Annotated[
        MemoryBudget | None,
        written(
            "Growth budget for device memory. If unset, Plimsoll watches device memory but never "
            "acts on its growth."
        ),
    ] = None
    shared_device: Annotated[
        bool,
        written(
            "Whether other pods use the same devices, for example with time-slicing or MPS. If "
            "true, Plimsoll judges only the memory that the engine's own allocator holds, because "
            "growth of the whole device may come from another pod. A resource whose name ends in "
            "`.shared` implies true. Defaults to false."
        ),
    ] = False
    warmup_s: Annotated[
        float,
        msgspec.Meta(ge=0),
        written(
            "Time after each engine start during which growth is treated as warm-up and not "
            "counted against a budget. Defaults to 1m.",
            name="warmup",
            form=DURATION,
        ),
    ] = 60.0


class RestartBudget(msgspec.Struct, frozen=True):
    """At most ``count`` disruptive actions within ``window_s``; then none until a person resets."""

    count: Annotated[
        int,
        msgspec.Meta(ge=0, le=1000),
        written(
            "Maximum number of restarts within `window`. After that, the supervisor restarts "
            "nothing until you run `plimsoll resume`. 0 forbids restarts. Defaults to 3."
        ),
    ] = 3
    window_s: Annotated[
        PositiveSeconds,
        written(
            "Period over which restarts are counted. Defaults to 1h.",
            name="window",
            form=POSITIVE_DURATION,
        ),
    ] = 3600.0


class Drain(msgspec.Struct, frozen=True):
    """What happens to running requests before a disruptive action."""

    mode: Annotated[
        DrainMode,
        written(
            "What happens to running requests. `finish` waits until they complete. `carry` resumes "
            "them after the worker restart. `abort` ends them with an error. Defaults to `carry`."
        ),
    ] = DrainMode.CARRY
    deadline_s: Annotated[
        PositiveSeconds,
        written(
            "Maximum duration of a drain. Requests that are still running then are aborted. "
            "Defaults to 30s.",
            name="deadline",
            form=POSITIVE_DURATION,
        ),
    ] = 30.0


class Stall(msgspec.Struct, frozen=True):
    """When an engine counts as stalled."""

    timeout_s: Annotated[
        PositiveSeconds,
        written(
            "Time without a completed engine step, while requests are waiting or running, after "
            "which the engine counts as stalled. Defaults to 2m.",
            name="timeout",
            form=POSITIVE_DURATION,
        ),
    ] = 120.0


_TIME_OF_DAY = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"


def _read_time_of_day(value: Any) -> float:
    if not isinstance(value, str) or not re.match(_TIME_OF_DAY.replace("$", r"\Z"), value):
        raise ValueError("must be a time of day in UTC, written HH:MM")
    hours, minutes = map(int, value.split(":"))
    return 3600.0 * hours + 60.0 * minutes


def _write_time_of_day(seconds: float) -> str:
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours:02d}:{minutes:02d}"


def _read_within_a_day(value: Any) -> float:
    seconds: float = POSITIVE_DURATION.read(value)
    if seconds > DAY_S:
        raise ValueError("must be at most 24h")
    return seconds


def _read_weekdays(value: Any) -> tuple[int, ...]:
    known = list(Weekday)
    if not isinstance(value, list) or any(day not in known for day in value):
        raise ValueError(f"may only name {', '.join(known)}")
    return tuple(sorted({known.index(Weekday(day)) for day in value}))


TIME_OF_DAY = FieldForm(
    _read_time_of_day, _write_time_of_day, {"type": "string", "pattern": _TIME_OF_DAY}
)
WITHIN_A_DAY = POSITIVE_DURATION._replace(
    read=_read_within_a_day,
    schema=POSITIVE_DURATION.schema
    | validations(
        rule(
            "duration(self) > duration('0s') && duration(self) <= duration('24h')",
            "duration must be more than 0 and at most 24h",
        )
    ),
)
WEEKDAYS = FieldForm(
    _read_weekdays,
    lambda days: [list(Weekday)[day].value for day in days],
    {
        "type": "array",
        "items": {"type": "string", "enum": [day.value for day in Weekday]},
        "maxItems": 7,
    },
)


class MaintenanceWindow(msgspec.Struct, frozen=True):
    """When restarts that can wait are done: from ``start_s`` after midnight UTC, ``duration_s``.

    ``days`` are the days on which it begins, 0 is Monday; none means every day.
    """

    start_s: Annotated[
        float,
        msgspec.Meta(ge=0, lt=86_400),
        written(
            "Time of day, in UTC, at which the window opens: HH:MM.", name="start", form=TIME_OF_DAY
        ),
    ]
    duration_s: Annotated[
        float,
        msgspec.Meta(gt=0, le=86_400),
        written(
            "How long the window stays open. At most 24h. Defaults to 4h.",
            name="duration",
            form=WITHIN_A_DAY,
        ),
    ] = 4 * 3600.0
    days: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=6)], ...],
        written("Days on which the window opens. If empty, it opens every day.", form=WEEKDAYS),
    ] = ()


def _read_ladder(value: Any) -> tuple[str, ...]:
    order = [action.value for action in Action]
    if not isinstance(value, list) or any(one not in order for one in value):
        raise ValueError(f"may only name {', '.join(order)}")
    if value != [one for one in order if one in value]:
        raise ValueError(f"must name each action once, in the order {', '.join(order)}")
    return tuple(value)


LADDER = FieldForm(
    _read_ladder,
    lambda ladder: [action.value for action in ladder],
    {
        "type": "array",
        "items": {"type": "string", "enum": [action.value for action in Action]},
        "maxItems": len(Action),
        **validations(
            rule(
                "self.all(a, self.exists_one(b, b == a))",
                "supervision.ladder must not name an action twice",
            ),
            rule(
                f"{[action.value for action in Action]}.filter(a, a in self) == self",
                f"supervision.ladder must be in the order {', '.join(Action)}",
            ),
        ),
    },
)


class Supervision(msgspec.Struct, frozen=True):
    """What the supervisor may do about a leak or a stall."""

    mode: Annotated[
        Mode,
        written(
            "Whether the supervisor acts. `Observe` records what it would do; `Recover` does it. "
            "Defaults to `Observe`."
        ),
    ] = Mode.OBSERVE
    ladder: Annotated[
        tuple[Action, ...],
        written(
            "Actions that the supervisor may take, in order from lightest to heaviest. "
            "`PodReplace` asks the operator to evict the pod after all other actions have failed; "
            "it is off unless you list it. Defaults to `Trim`, `WorkerRestart`, `EngineRestart`.",
            form=LADDER,
        ),
    ] = (Action.TRIM, Action.WORKER_RESTART, Action.ENGINE_RESTART)
    drain: Annotated[
        Drain, written("What happens to running requests before a disruptive action.")
    ] = Drain()
    restart_budget: Annotated[
        RestartBudget, written("Upper bound on the restarts that supervisors perform.")
    ] = RestartBudget()
    max_unavailable: Annotated[
        int,
        msgspec.Meta(ge=1, le=MAX_SLOTS),
        written(
            "Maximum number of replicas that may be unavailable at the same time because of a "
            "restart or an eviction. Defaults to 1."
        ),
    ] = 1
    stall: Annotated[Stall, written("When an engine counts as stalled.")] = Stall()
    maintenance_window: Annotated[
        MaintenanceWindow | None,
        written(
            "When the supervisor performs restarts that can wait. Stalled engines, and leaks that "
            "would exhaust memory before the window opens, are restarted at once. If unset, no "
            "restart waits."
        ),
    ] = None
    sweep_shared_memory: Annotated[
        bool,
        written(
            "Whether the supervisor, in mode `Recover`, deletes files in `/dev/shm` that a "
            "terminated engine wrote and that no process of the pod maps or has open. If false, "
            "only `PodReplace` returns such memory. Leave it false if the engine reuses files of "
            "an earlier start. Defaults to false."
        ),
    ] = False
    log_level: Annotated[
        LogLevel,
        written(
            "Lowest severity that the supervisor logs. A change takes effect without a restart. "
            "Defaults to `Info`."
        ),
    ] = LogLevel.INFO


class GroupMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of a pod in a multi-node group, which is one replica of its workload.

    ``index`` names the group within the workload. The leader serves, and restarts the group; a
    ``worker`` serves nothing. ``subdomain`` is the headless Service that lists the group's pods,
    empty where there is none.
    """

    index: Annotated[str, msgspec.Meta(max_length=63)]
    worker: bool = False
    subdomain: Annotated[str, msgspec.Meta(max_length=63)] = ""


class ServiceRef(msgspec.Struct, frozen=True):
    """The InferenceService or SupervisionPolicy that a replica belongs to, by ``kind``.

    ``uid`` is empty in local mode. ``workload`` owns a policy's pod, and ``group`` is the pod's
    place in a multi-node group of that workload.
    """

    name: str
    namespace: str = "default"
    uid: str = ""
    kind: str = SERVICE_KIND
    workload: WorkloadRef | None = None
    group: GroupMember | None = None

    @property
    def is_worker(self) -> bool:
        """Whether the leader of the pod's group speaks for it."""
        return self.group is not None and self.group.worker


class EngineEndpoint(msgspec.Struct, frozen=True):
    """Where the engine answers: both on the pod's own loopback.

    ``container`` is the name of its container, which is in that container's environment
    (:data:`CONTAINER_ENV`); empty where nobody set it, as outside of a pod. What does not
    ``serve`` is the worker of a multi-node engine: nothing listens there.
    """

    type: EngineType
    admin_url: str
    serving_url: str
    model: str = ""
    version: str = ""
    container: str = ""
    serves: bool = True


class PodEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine of one pod, as it was found when the pod was created.

    ``memory_limit_bytes`` is the memory limit of its container, None if it has none.
    ``shared_device`` says whether a device plugin gives it a share of a device.
    """

    engine: EngineEndpoint
    workload: WorkloadRef | None = None
    group: GroupMember | None = None
    memory_limit_bytes: PositiveBytes | None = None
    shared_device: bool = False


class SupervisorConfig(msgspec.Struct, frozen=True):
    """The supervisor's whole configuration file.

    ``slots`` names the service's restart-slot Leases; it is empty in local mode. In the file of a
    SupervisionPolicy they are those of its pods that no workload owns.
    """

    service: ServiceRef
    engine: EngineEndpoint
    memory: MemoryPolicy = MemoryPolicy()
    supervision: Supervision = Supervision()
    slots: tuple[str, ...] = ()
    sample_interval_s: PositiveSeconds = 1.0


def of_pod(config: SupervisorConfig, pod: PodEngine) -> SupervisorConfig:
    """Combine a policy's configuration with what admission found in one of its pods.

    The result has the pod's engine and memory limit, and the slots of its workload. The supervisor
    of a worker only observes: its group's leader acts.
    """
    memory, host = config.memory, config.memory.host
    if host is not None and host.limit_bytes is None and pod.memory_limit_bytes is not None:
        # A budget above the limit could never be spent: the kernel would be first.
        growth = min(host.growth_bytes, pod.memory_limit_bytes)
        host = replace(host, growth_bytes=growth, limit_bytes=pod.memory_limit_bytes)
    shared = memory.shared_device or pod.shared_device
    supervision = config.supervision
    if pod.workload is None:  # nothing would create the pod anew
        ladder = tuple(one for one in supervision.ladder if one is not Action.POD_REPLACE)
        supervision = replace(supervision, ladder=ladder)
    service = replace(config.service, workload=pod.workload, group=pod.group)
    slots = slots_of(config.service.name, pod.workload, len(config.slots))
    if service.is_worker:
        supervision, slots = replace(supervision, mode=Mode.OBSERVE), ()
    return replace(
        config,
        service=service,
        engine=pod.engine,
        memory=replace(memory, host=host, shared_device=shared),
        supervision=supervision,
        slots=slots,
    )


def decode(data: bytes) -> SupervisorConfig:
    """Read a configuration file; msgspec.DecodeError names the field that is wrong.

    Unknown fields are ignored: an upgrade of the operator restarts no pods, so older supervisors
    read what a newer operator wrote.
    """
    return msgspec.json.decode(data, type=SupervisorConfig)


def encode(config: SupervisorConfig) -> bytes:
    """Write a configuration file.

    The same configuration always gives the same bytes, so that a ConfigMap does not flap.
    """
    return msgspec.json.format(msgspec.json.encode(config, order="sorted"), indent=2) + b"\n"
