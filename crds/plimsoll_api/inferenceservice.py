"""Spec of InferenceService, a supervised inference engine.

The CRD is generated from these models (:mod:`plimsoll_api.generate`), which apply the same rules,
so local mode accepts the same manifests as the API server.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from plimsoll_api import parallelism as groups
from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.engines import EngineType
from plimsoll_api.inferenceservice_status import InferenceServiceStatus
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.names import API_VERSION, SERVICE_KIND
from plimsoll_api.operation import (
    AUTOSCALING_RULES,
    MAX_SERVICE_REPLICAS,
    ROLLOUT_RULES,
    Autoscaling,
    Disruption,
    Gateway,
    NetworkPolicy,
    Observability,
    Rollout,
    ServiceOptions,
)
from plimsoll_api.parallelism import Parallelism
from plimsoll_api.probe import PROBE_RULES as PROBE_RULES
from plimsoll_api.probe import Probe, explain_refused_probe
from plimsoll_api.schema import FromStruct, PreservedObject, ResourceModel
from plimsoll_api.serving import ENGINE_RULES, MODEL_RULES, Engine, ModelSource, SupervisorContainer
from plimsoll_api.supervision import GATE_MESSAGE, SCOPE_MESSAGE, SlotScope, Supervision
from plimsoll_api.units import format_bytes, parse_bytes

MAX_NAME_CHARS = 50
"""Maximum length of a name; the names of owned objects add up to 13 characters."""

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


class RollingRestart(ResourceModel):
    """Request for a rolling restart."""

    id: Annotated[str, StringConstraints(max_length=253)] | None = Field(
        default=None, description="Any text. Change it to start a rolling restart."
    )


_BUDGET_WITHIN_LIMIT_RULE = (
    "!has(self.memory.host) || !('memory' in self.engine.resources.?limits.orValue({})) || "
    "string(self.memory.host.growthBudget) == 'Auto' || "
    "quantity(string(self.memory.host.growthBudget))"
    ".compareTo(quantity(string(self.engine.resources.limits['memory']))) <= 0"
)


class InferenceServiceSpec(ResourceModel):
    """The desired state."""

    replicas: Annotated[int, Field(ge=0, le=MAX_SERVICE_REPLICAS)] = Field(
        default=1,
        description="Desired number of replicas. With `autoscaling`, this is only the initial "
        "number, limited to the range from `minReplicas` to `maxReplicas`. Defaults to 1.",
    )
    autoscaling: Autoscaling | None = Field(
        default=None,
        description="Automatic scaling by a HorizontalPodAutoscaler or by a ScaledObject of "
        "KEDA. If unset, `replicas` is the number of replicas.",
        json_schema_extra=AUTOSCALING_RULES,
    )
    model: ModelSource = Field(description="Model to serve.", json_schema_extra=MODEL_RULES)
    engine: Engine = Field(
        default_factory=Engine,
        description="Engine that serves the model.",
        json_schema_extra=ENGINE_RULES,
    )
    parallelism: Parallelism | None = Field(
        default=None,
        description="How a `vllm` or `sglang` engine distributes the model over devices. If the "
        "devices are on several nodes, each replica is a group of pods, and the operator creates "
        "a LeaderWorkerSet. If unset, `engine.args` decides, and each replica is one pod.",
    )
    memory: Annotated[MemoryPolicy, FromStruct(MemoryPolicy)] = Field(
        default_factory=MemoryPolicy, description="Memory budgets of each replica."
    )
    supervision: Annotated[Supervision, FromStruct(Supervision)] = Field(
        default_factory=Supervision,
        description="How the supervisor responds to memory leaks and stalls.",
    )
    supervisor: SupervisorContainer = Field(
        default_factory=SupervisorContainer, description="Settings of the supervisor's container."
    )
    probe: Annotated[Probe, FromStruct(Probe)] = Field(
        default_factory=Probe,
        description="Probe inside a `vllm`, `sglang` or `custom` engine.",
    )
    pod_template: PreservedObject | None = Field(
        default=None,
        description="Pod template (`metadata` and `spec`) to merge over the "
        "operator's template, as in a strategic merge patch. Containers merge by name "
        "(`engine`, `supervisor`).",
    )
    restart: RollingRestart = Field(
        default_factory=RollingRestart, description="Request for a rolling restart."
    )
    rollout: Rollout = Field(
        default_factory=Rollout,
        description="How new pods replace old pods.",
        json_schema_extra=ROLLOUT_RULES,
    )
    disruption: Disruption = Field(
        default_factory=Disruption, description="PodDisruptionBudget for the replicas."
    )
    service: ServiceOptions = Field(
        default_factory=ServiceOptions, description="Services in front of the replicas."
    )
    gateway: Gateway | None = Field(
        default=None,
        description="InferencePool and HTTPRoute for the Gateway API Inference Extension. If the "
        "cluster lacks one of these kinds, Plimsoll creates neither object and sets the "
        "condition `ObjectsComplete` to False. If unset, Plimsoll creates neither object.",
    )
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy,
        description="NetworkPolicy that limits who may reach the replicas.",
    )
    observability: Observability = Field(
        default_factory=Observability, description="Objects for the Prometheus operator."
    )

    @model_validator(mode="after")
    def _check_budget_below_limit(self) -> Self:
        budget, limit = self.memory.host, self.engine.resources.limits.get("memory")
        fixed = budget is not None and not budget.auto
        if budget and fixed and limit and budget.growth_bytes > parse_bytes(limit):
            raise ValueError(
                f"memory.host.growthBudget ({format_bytes(budget.growth_bytes)}) must not be "
                f"larger than engine.resources.limits.memory {limit}"
            )
        return self

    @model_validator(mode="after")
    def _check_scope(self) -> Self:
        if self.supervision.scope is not SlotScope.WORKLOAD:
            raise ValueError(SCOPE_MESSAGE)
        return self

    @model_validator(mode="after")
    def _check_start_gate(self) -> Self:
        if self.supervision.start_gate and self.engine.type is not EngineType.PLIMSOLL:
            raise ValueError(GATE_MESSAGE)
        return self

    @model_validator(mode="after")
    def _check_probe(self) -> Self:
        if (refused := explain_refused_probe(self.probe, self.engine)) is not None:
            raise ValueError(refused)
        return self

    @model_validator(mode="after")
    def _check_parallelism(self) -> Self:
        if (
            refused := groups.explain_refused_parallelism(self.parallelism, self.engine)
        ) is not None:
            raise ValueError(refused)
        return self

    @property
    def nodes(self) -> int:
        """Number of nodes of each replica, which is also the number of its pods."""
        return groups.count_nodes(self.parallelism, self.engine)


class ObjectMeta(ResourceModel):
    """Fields of an object's metadata that Plimsoll uses. Other fields are ignored."""

    model_config = ResourceModel.model_config | {"extra": "ignore"}

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if len(name) > MAX_NAME_CHARS or not re.match(NAME_PATTERN, name):
            raise ValueError(
                f"{name!r} must be at most {MAX_NAME_CHARS} lower-case letters, digits and dashes,"
                " and begin with a letter"
            )
        return name


class InferenceService(ResourceModel):
    """An inference engine under a memory budget: a Deployment, a Service and supervisors."""

    api_version: Literal["plimsoll.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["InferenceService"] = SERVICE_KIND  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: InferenceServiceSpec = Field(
        description="Desired state.",
        json_schema_extra=make_validations(
            make_rule(
                _BUDGET_WITHIN_LIMIT_RULE,
                "memory.host.growthBudget must not be larger than engine.resources.limits.memory",
                fieldPath=".memory.host",
            ),
            make_rule(
                "!has(self.supervision) || !has(self.supervision.startGate) || "
                "!has(self.engine) || !has(self.engine.type) || self.engine.type == 'plimsoll'",
                GATE_MESSAGE,
                fieldPath=".supervision.startGate",
            ),
            make_rule(
                "!has(self.supervision) || !has(self.supervision.scope) || "
                f"self.supervision.scope == '{SlotScope.WORKLOAD}'",
                SCOPE_MESSAGE,
                fieldPath=".supervision.scope",
            ),
            *PROBE_RULES,
            *groups.PARALLELISM_RULES,
        ),
    )
    status: InferenceServiceStatus | None = Field(
        default=None, description="Observed state, written by the operator. Read-only."
    )

    @model_validator(mode="after")
    def _check_name_length(self) -> Self:
        if (
            self.spec.parallelism is not None
            and len(self.metadata.name) > groups.MAX_SERVICE_NAME_CHARS
        ):
            raise ValueError(groups.NAME_MESSAGE)
        return self

    @property
    def served_name(self) -> str:
        """Model name that clients use."""
        return self.spec.model.served_name or self.metadata.name
