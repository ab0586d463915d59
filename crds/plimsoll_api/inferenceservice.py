"""InferenceService, spec side: what a person writes to have a supervised inference engine.

The CRD is generated from these models (:mod:`plimsoll_api.generate`). What the API server's schema
and CEL rules refuse, these models refuse too, so that a manifest means the same in local mode.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from plimsoll_api.admin import DrainMode
from plimsoll_api.inferenceservice_status import InferenceServiceStatus
from plimsoll_api.operation import (
    AUTOSCALING_RULES,
    MAX_REPLICAS,
    ROLLOUT_RULES,
    Autoscaling,
    Disruption,
    NetworkPolicy,
    Observability,
    Rollout,
    ServiceOptions,
)
from plimsoll_api.schema import (
    API_VERSION,
    Duration,
    Model,
    PositiveDuration,
    PositiveQuantity,
    PreservedObject,
    rule,
    validations,
)
from plimsoll_api.serving import ENGINE_RULES, MODEL_RULES, Engine, ModelSource, Supervisor
from plimsoll_api.supervision import Action, LogLevel, Mode
from plimsoll_api.units import parse_bytes, parse_duration

KIND = "InferenceService"
PLURAL = "inferenceservices"
SHORT_NAME = "plinf"
MAX_NAME = 50
"""Names of owned objects add up to 13 characters to it, within a label value's 63."""

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
MAX_SLOTS = 16
DAY_S = 86_400.0

_LADDER_ORDER = tuple(Action)
Weekday = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


class MemoryBudget(Model):
    """How much unexplained memory a replica may gain."""

    growth_budget: PositiveQuantity = Field(
        description="Unexplained growth that is allowed per replica within `window`, in bytes. "
        "To allow none is not possible, and no budget at all is the field above left out.",
        json_schema_extra=validations(
            rule(
                "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
                "growthBudget must be more than 0; leave host or device out for no budget",
            )
        ),
    )
    window: PositiveDuration = Field(default="24h", description="The time that the budget is for.")
    limit: PositiveQuantity | None = Field(
        default=None,
        description="Memory at which the replica dies, in bytes. Default for host: the engine's "
        "memory limit. Default for device: the device's size.",
    )

    @model_validator(mode="after")
    def _below_limit(self) -> Self:
        if self.limit is not None and parse_bytes(self.growth_budget) > parse_bytes(self.limit):
            raise ValueError(
                f"growthBudget {self.growth_budget} must not be larger than limit {self.limit}"
            )
        return self


def _budget_rule() -> dict[str, Any]:
    return validations(
        rule(
            "!has(self.limit) || quantity(string(self.growthBudget))"
            ".compareTo(quantity(string(self.limit))) <= 0",
            "growthBudget must not be larger than limit",
            fieldPath=".growthBudget",
        )
    )


class Memory(Model):
    """Budgets for memory that grows. Without a budget memory is watched and never acted on."""

    host: MemoryBudget | None = Field(
        default=None, description="Budget for host memory.", json_schema_extra=_budget_rule()
    )
    device: MemoryBudget | None = Field(
        default=None, description="Budget for device memory.", json_schema_extra=_budget_rule()
    )
    shared_device: bool = Field(
        default=False,
        description="Other pods use the same devices (time-slicing, MPS). Then only what the "
        "engine's own allocator holds is judged: growth of the whole device is not this replica's "
        "to act on. Resources named `*.shared` mean it, too.",
    )
    warmup: Duration = Field(
        default="60s", description="Time after a start in which growth counts as warm-up."
    )


class Drain(Model):
    """What becomes of running requests when something disruptive is done."""

    mode: DrainMode = Field(
        default=DrainMode.CARRY,
        description="`finish`: they run to their end. `carry`: they go on after a worker restart. "
        "`abort`: they end with an error.",
    )
    deadline: PositiveDuration = Field(
        default="30s", description="How long a drain may take. What still runs then is aborted."
    )


class RestartBudget(Model):
    """How many restarts are allowed; when they are spent, none until a person resets."""

    count: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=3, description="Restarts within `window`. 0 allows none."
    )
    window: PositiveDuration = Field(default="1h", description="The time that the count is for.")


class Stall(Model):
    """When an engine counts as stalled."""

    timeout: PositiveDuration = Field(
        default="2m", description="Work waiting and no step done for this long is a stall."
    )


class MaintenanceWindow(Model):
    """When restarts that can wait are done."""

    start: Annotated[str, StringConstraints(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")] = Field(
        description="Time of day in UTC at which it opens, HH:MM."
    )
    duration: PositiveDuration = Field(
        default="4h",
        description="How long it stays open, at most 24h.",
        json_schema_extra=validations(
            rule(
                "duration(self) > duration('0s') && duration(self) <= duration('24h')",
                "duration must be more than 0 and at most 24h",
            )
        ),
    )
    days: Annotated[list[Weekday], Field(max_length=7)] = Field(
        default=[], description="Days on which it opens. None are all days."
    )

    @field_validator("duration")
    @classmethod
    def _within_a_day(cls, duration: str) -> str:
        if parse_duration(duration) > DAY_S:
            raise ValueError("must be at most 24h")
        return duration


class Supervision(Model):
    """What the supervisor may do about a leak or a stall."""

    mode: Mode = Field(
        default=Mode.OBSERVE,
        description="`Observe` records what it would have done, `Recover` does it.",
    )
    ladder: Annotated[list[Action], Field(max_length=4)] = Field(
        default=[Action.TRIM, Action.WORKER_RESTART, Action.ENGINE_RESTART],
        description="Actions that it may take, lightest first. `PodReplace` is not among them "
        "unless it is named: the operator then evicts a pod that nothing else has cured.",
        json_schema_extra=validations(
            rule(
                "self.all(a, self.exists_one(b, b == a))",
                "supervision.ladder must not name an action twice",
            ),
            rule(
                f"{[action.value for action in _LADDER_ORDER]}.filter(a, a in self) == self",
                f"supervision.ladder must be in the order {', '.join(_LADDER_ORDER)}",
            ),
        ),
    )
    drain: Drain = Field(default_factory=Drain, description="How running requests are treated.")
    restart_budget: RestartBudget = Field(
        default_factory=RestartBudget, description="Hard stop for restarts."
    )
    max_unavailable: Annotated[int, Field(ge=1, le=MAX_SLOTS)] = Field(
        default=1,
        description="Replicas of the service that may be out for a restart or an eviction at the "
        "same time.",
    )
    stall: Stall = Field(default_factory=Stall, description="Detection of stalls.")
    maintenance_window: MaintenanceWindow | None = Field(
        default=None,
        description="When restarts that can wait are done. Stalls are not waited with, nor leaks "
        "whose memory would not last until it opens.",
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="The least that the supervisor logs. A change needs no restart.",
    )

    @field_validator("ladder")
    @classmethod
    def _ascending(cls, ladder: list[Action]) -> list[Action]:
        if ladder != [action for action in _LADDER_ORDER if action in ladder]:
            order = ", ".join(_LADDER_ORDER)
            raise ValueError(f"must name each action once, in the order {order}")
        return ladder


class Restart(Model):
    """Asks for a rolling restart."""

    id: Annotated[str, StringConstraints(max_length=253)] | None = Field(
        default=None, description="Any text; a change of it replaces the pods one after the other."
    )


_LIMIT_OF_ENGINE = (
    "!has(self.memory.host) || !('memory' in self.engine.resources.?limits.orValue({})) || "
    "quantity(string(self.memory.host.growthBudget))"
    ".compareTo(quantity(string(self.engine.resources.limits['memory']))) <= 0"
)


class InferenceServiceSpec(Model):
    """The wanted state."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = Field(
        default=1,
        description="How many replicas there are. Under `autoscaling` only how many it begins "
        "with.",
    )
    autoscaling: Autoscaling | None = Field(
        default=None,
        description="Lets a HorizontalPodAutoscaler set the number of replicas.",
        json_schema_extra=AUTOSCALING_RULES,
    )
    model: ModelSource = Field(description="What is served.", json_schema_extra=MODEL_RULES)
    engine: Engine = Field(
        default_factory=Engine, description="The engine.", json_schema_extra=ENGINE_RULES
    )
    memory: Memory = Field(
        default_factory=Memory, description="How much memory a replica may gain."
    )
    supervision: Supervision = Field(
        default_factory=Supervision, description="What is done about leaks and stalls."
    )
    supervisor: Supervisor = Field(
        default_factory=Supervisor, description="The supervisor's own container."
    )
    pod_template: PreservedObject | None = Field(
        default=None,
        description="A pod template (`metadata`, `spec`) that is merged over the operator's: "
        "containers by name (`engine`, `supervisor`), other lists as strategic merge does.",
    )
    restart: Restart = Field(default_factory=Restart, description="Asks for a rolling restart.")
    rollout: Rollout = Field(
        default_factory=Rollout,
        description="How new pods take the place of old ones.",
        json_schema_extra=ROLLOUT_RULES,
    )
    disruption: Disruption = Field(
        default_factory=Disruption, description="How many replicas evictions may take at once."
    )
    service: ServiceOptions = Field(
        default_factory=ServiceOptions, description="The Services in front of the replicas."
    )
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy, description="Who may reach the replicas."
    )
    observability: Observability = Field(
        default_factory=Observability, description="What the Prometheus operator gets."
    )

    @model_validator(mode="after")
    def _budget_below_engine_limit(self) -> Self:
        budget, limit = self.memory.host, self.engine.resources.limits.get("memory")
        if budget and limit and parse_bytes(budget.growth_budget) > parse_bytes(limit):
            raise ValueError(
                f"memory.host.growthBudget {budget.growth_budget} must not be larger than "
                f"engine.resources.limits.memory {limit}"
            )
        return self


class ObjectMeta(Model):
    """The part of an object's metadata that is read here; the rest is ignored."""

    model_config = Model.model_config | {"extra": "ignore"}

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _usable(cls, name: str) -> str:
        if len(name) > MAX_NAME or not re.match(NAME_PATTERN, name):
            raise ValueError(
                f"{name!r} must be at most {MAX_NAME} lower-case letters, digits and dashes, and "
                "begin with a letter"
            )
        return name


class InferenceService(Model):
    """An inference engine under a memory budget: Deployment, Service and supervisor."""

    api_version: Literal["plimsoll.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["InferenceService"] = KIND  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: InferenceServiceSpec = Field(
        description="The wanted state.",
        json_schema_extra=validations(
            rule(
                _LIMIT_OF_ENGINE,
                "memory.host.growthBudget must not be larger than engine.resources.limits.memory",
                fieldPath=".memory.host",
            )
        ),
    )
    status: InferenceServiceStatus | None = Field(
        default=None, description="The observed state, written by the operator."
    )

    @property
    def served_name(self) -> str:
        """The model name that clients use."""
        return self.spec.model.served_name or self.metadata.name
