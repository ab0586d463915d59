"""``spec.supervision``: what the supervisor may do about a leak or a stall."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar

import msgspec

from plimsoll_api.admin import DrainMode
from plimsoll_api.cel import Rule, make_rule, make_validations
from plimsoll_api.maintenance_window import MaintenanceWindow
from plimsoll_api.manifest import POSITIVE_DURATION_FORM, FieldForm, PositiveSeconds, describe_field
from plimsoll_api.open_enum import OpenEnum

MAX_SLOTS = 16


class Mode(StrEnum):
    """Mode of the supervisor: ``Observe`` only records its decisions; ``Recover`` also acts."""

    OBSERVE = "Observe"
    RECOVER = "Recover"


class SlotScope(StrEnum):
    """Set of pods that share restart slots: one role of a workload, or a whole graph."""

    WORKLOAD = "Workload"
    GRAPH = "Graph"


class LogLevel(StrEnum):
    """Lowest severity that the supervisor logs."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class Action(OpenEnum):
    """Actions of the remediation ladder, least disruptive first."""

    TRIM = "Trim"
    WORKER_RESTART = "WorkerRestart"
    ENGINE_RESTART = "EngineRestart"
    POD_REPLACE = "PodReplace"


class RestartBudget(msgspec.Struct, frozen=True):
    """Maximum number of restarts within a window. A person must reset an exhausted budget."""

    count: Annotated[
        int,
        msgspec.Meta(ge=0, le=1000),
        describe_field(
            "Maximum number of restarts within `window`. After that, the supervisor restarts "
            "nothing until you run `plimsoll resume`. 0 forbids restarts. Defaults to 3."
        ),
    ] = 3
    window_s: Annotated[
        PositiveSeconds,
        describe_field(
            "Period over which restarts are counted. Defaults to 1h.",
            name="window",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = 3600.0


_DRAIN_MODES = {mode.value.capitalize(): mode for mode in DrainMode}


_STORED_DRAIN_MODES = _DRAIN_MODES | {mode.value: mode for mode in DrainMode}
"""Drain modes by accepted value, including those that an earlier release stored as defaults."""


def _read_drain_mode(value: Any) -> DrainMode:
    if not isinstance(value, str) or value not in _STORED_DRAIN_MODES:
        raise ValueError(f"must be one of {', '.join(_DRAIN_MODES)}")
    return _STORED_DRAIN_MODES[value]


DRAIN_MODE_FORM = FieldForm(
    _read_drain_mode,
    lambda mode: mode.value.capitalize(),
    {"type": "string", "enum": list(_DRAIN_MODES)},
)
"""Form of a drain mode in CamelCase; the admin protocol keeps lower case for older engines."""


class Drain(msgspec.Struct, frozen=True):
    """Drain of running requests before a disruptive action."""

    mode: Annotated[
        DrainMode,
        describe_field(
            "What happens to running requests. `Finish` waits until they complete. `Carry` resumes "
            "them after the worker restart. `Abort` ends them with an error. Defaults to `Carry`.",
            form=DRAIN_MODE_FORM,
        ),
    ] = DrainMode.CARRY
    deadline_s: Annotated[
        PositiveSeconds,
        describe_field(
            "Maximum duration of a drain. Requests that are still running then are aborted. "
            "Defaults to 30s.",
            name="deadline",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = 30.0


class Stall(msgspec.Struct, frozen=True):
    """Criterion for a stalled engine."""

    timeout_s: Annotated[
        PositiveSeconds,
        describe_field(
            "Time without a completed engine step, while requests are waiting or running, after "
            "which the engine counts as stalled. Defaults to 2m.",
            name="timeout",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = 120.0


def _read_ladder(value: Any) -> tuple[str, ...]:
    order = [action.value for action in Action]
    if not isinstance(value, list) or any(one not in order for one in value):
        raise ValueError(f"must contain only {', '.join(order)}")
    if value != [one for one in order if one in value]:
        raise ValueError(f"must name each action once, in the order {', '.join(order)}")
    return tuple(value)


LADDER_FORM = FieldForm(
    _read_ladder,
    lambda ladder: [action.value for action in ladder],
    {
        "type": "array",
        "items": {"type": "string", "enum": [action.value for action in Action]},
        "maxItems": len(Action),
        **make_validations(
            make_rule(
                "self.all(a, self.exists_one(b, b == a))",
                "supervision.ladder must not name an action twice",
            ),
            make_rule(
                f"{[action.value for action in Action]}.filter(a, a in self) == self",
                f"supervision.ladder must be in the order {', '.join(Action)}",
            ),
        ),
    },
)


class Recycle(msgspec.Struct, frozen=True):
    """Planned restarts of healthy engines that have reached a maximum age."""

    max_age_s: Annotated[
        PositiveSeconds,
        describe_field(
            "Time since the engine's last start after which the supervisor restarts it, even if "
            "nothing is wrong. At least `restartBudget.window`.",
            name="maxAge",
            form=POSITIVE_DURATION_FORM,
        ),
    ]
    when_idle_for_s: Annotated[
        PositiveSeconds | None,
        describe_field(
            "Time without any request after which an engine that has reached `maxAge` may be "
            "restarted. If unset, the engine is restarted even if requests are running, which "
            "are drained first.",
            name="whenIdleFor",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = None
    window: Annotated[
        MaintenanceWindow | None,
        describe_field("Window for these restarts. Defaults to `maintenanceWindow`."),
    ] = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        make_rule(
            "!has(self.whenIdleFor) || duration(self.whenIdleFor) < duration(self.maxAge)",
            "recycle.whenIdleFor must be shorter than recycle.maxAge",
        ),
    )

    def __post_init__(self) -> None:
        if self.when_idle_for_s is not None and self.when_idle_for_s >= self.max_age_s:
            raise ValueError("recycle.whenIdleFor must be shorter than recycle.maxAge")


class StartGate(msgspec.Struct, frozen=True):
    """Delay of a restarted engine while its devices still hold memory."""

    within_s: Annotated[
        PositiveSeconds,
        describe_field(
            "Maximum time that a starting engine waits until its devices are free. Defaults to 1m.",
            name="within",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = 60.0
    then: Annotated[
        Action | None,
        describe_field(
            "What happens if the devices are not free in time. `PodReplace` asks the operator to "
            "replace the pod, and requires `PodReplace` in `ladder`. If unset, the engine starts "
            "anyway.",
            schema={"type": "string", "enum": [Action.POD_REPLACE.value]},
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.then not in (None, Action.POD_REPLACE):
            raise ValueError(f"startGate.then may only be {Action.POD_REPLACE}")


_TOO_OFTEN_MESSAGE = (
    "recycle.maxAge must be at least restartBudget.window (1h if unset), so that the budget also"
    " allows restarts for leaks"
)
_NO_RESTARTS_MESSAGE = (
    "recycle requires restarts: set restartBudget.count above 0, or remove recycle"
)
GATE_MESSAGE = (
    "supervision.startGate is only supported for engine.type plimsoll, because other engines do"
    " not ask the supervisor before they start"
)
SCOPE_MESSAGE = (
    "supervision.scope: Graph is only supported in a SupervisionPolicy, because all pods of an"
    " InferenceService have the same role"
)
_NO_REPLACEMENT_MESSAGE = (
    "startGate.then: PodReplace requires PodReplace in ladder: add it, or remove startGate.then"
)
_NO_RUNG_MESSAGE = (
    "recycle requires WorkerRestart, EngineRestart or PodReplace in ladder: add one of them, or"
    " remove recycle"
)


class Supervision(msgspec.Struct, frozen=True):
    """Actions that the supervisor may take because of a leak or a stall, and their limits."""

    mode: Annotated[
        Mode,
        describe_field(
            "Whether the supervisor acts. `Observe` records what it would do; `Recover` does it. "
            "Defaults to `Observe`."
        ),
    ] = Mode.OBSERVE
    ladder: Annotated[
        tuple[Action, ...],
        describe_field(
            "Actions that the supervisor may take, in order from lightest to heaviest. "
            "`PodReplace` asks the operator to evict the pod after all other actions have failed; "
            "it is off unless you list it. Defaults to `Trim`, `WorkerRestart`, `EngineRestart`.",
            form=LADDER_FORM,
        ),
    ] = (Action.TRIM, Action.WORKER_RESTART, Action.ENGINE_RESTART)
    drain: Annotated[
        Drain, describe_field("What happens to running requests before a disruptive action.")
    ] = Drain()
    restart_budget: Annotated[
        RestartBudget, describe_field("Maximum number of restarts by supervisors.")
    ] = RestartBudget()
    max_unavailable: Annotated[
        int,
        msgspec.Meta(ge=1, le=MAX_SLOTS),
        describe_field(
            "Maximum number of replicas that may be unavailable at the same time because of a "
            "restart or an eviction. Defaults to 1."
        ),
    ] = 1
    scope: Annotated[
        SlotScope,
        describe_field(
            "Set of pods to which `maxUnavailable` applies, for a SupervisionPolicy. With "
            "`Workload`, it applies to each workload, and to each role of disaggregated serving, "
            "separately. With `Graph`, it applies to all roles together: if it is 1, a prefill "
            "engine and a decode engine never restart at the same time. Defaults to `Workload`."
        ),
    ] = SlotScope.WORKLOAD
    stall: Annotated[Stall, describe_field("Criterion for a stalled engine.")] = Stall()
    maintenance_window: Annotated[
        MaintenanceWindow | None,
        describe_field(
            "Time for restarts that can wait. An engine is restarted at once if it is stalled, "
            "or if a leak would exhaust memory before the window opens. If unset, no restart "
            "waits."
        ),
    ] = None
    recycle: Annotated[
        Recycle | None,
        describe_field(
            "Planned restarts of healthy engines that have reached a maximum age, within "
            "`restartBudget` and `maxUnavailable`. A replica is taken out of service only if "
            "another replica is ready. If unset, no healthy engine is restarted."
        ),
    ] = None
    start_gate: Annotated[
        StartGate | None,
        describe_field(
            "Delay of a restarted engine until NVML reports that its devices are free. Only for "
            "engines of the type `plimsoll`. If unset, engines start at once."
        ),
    ] = None
    sweep_shared_memory: Annotated[
        bool,
        describe_field(
            "Whether the supervisor, in mode `Recover`, deletes files in `/dev/shm` that a "
            "terminated engine wrote and that no process of the pod maps or has open. If false, "
            "only `PodReplace` returns such memory. Leave it false if the engine reuses files of "
            "an earlier start. Defaults to false."
        ),
    ] = False
    log_level: Annotated[
        LogLevel,
        describe_field(
            "Lowest severity that the supervisor logs. A change takes effect without a restart. "
            "Defaults to `Info`."
        ),
    ] = LogLevel.INFO

    RULES: ClassVar[tuple[Rule, ...]] = (
        make_rule(
            "!has(self.recycle) || duration(self.recycle.maxAge) >= "
            "(has(self.restartBudget) && has(self.restartBudget.window) ? "
            "duration(self.restartBudget.window) : duration('1h'))",
            _TOO_OFTEN_MESSAGE,
            fieldPath=".recycle",
        ),
        make_rule(
            "!has(self.recycle) || !has(self.restartBudget) || !has(self.restartBudget.count) || "
            "self.restartBudget.count > 0",
            _NO_RESTARTS_MESSAGE,
            fieldPath=".recycle",
        ),
        make_rule(
            "!has(self.recycle) || !has(self.ladder) || self.ladder.exists(a, a != 'Trim')",
            _NO_RUNG_MESSAGE,
            fieldPath=".recycle",
        ),
        make_rule(
            "!has(self.startGate) || !has(self.startGate.then) || "
            "(has(self.ladder) && 'PodReplace' in self.ladder)",
            _NO_REPLACEMENT_MESSAGE,
            fieldPath=".startGate",
        ),
    )

    def __post_init__(self) -> None:
        replaces = self.start_gate is not None and self.start_gate.then is not None
        if replaces and Action.POD_REPLACE not in self.ladder:
            raise ValueError(_NO_REPLACEMENT_MESSAGE)
        if self.recycle is None:
            return
        if self.recycle.max_age_s < self.restart_budget.window_s:
            raise ValueError(_TOO_OFTEN_MESSAGE)
        if not self.restart_budget.count:
            raise ValueError(_NO_RESTARTS_MESSAGE)
        if not set(self.ladder) - {Action.TRIM}:
            raise ValueError(_NO_RUNG_MESSAGE)
