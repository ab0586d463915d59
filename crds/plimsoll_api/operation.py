"""Operational part of an InferenceService: scaling, rollouts, network, monitoring."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.schema import PositiveDuration, PositiveQuantity, PreservedObject, ResourceModel

MAX_SERVICE_REPLICAS = 1000
COUNT_OR_PERCENT_PATTERN = r"^(0|[1-9][0-9]{0,3}|(0|[1-9][0-9]{0,2})%)$"
COUNT_OR_SHARE_PATTERN = r"^(0|[1-9][0-9]{0,3}|(0|[1-9][0-9]?|100)%)$"
_COUNT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "minimum": 0,
    "maximum": 9999,
    "x-kubernetes-int-or-string": True,
}
_LABEL_VALUE_PATTERN = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"

_METRIC_NAME_PATTERN = r"^[^/%]*[^/%.][^/%]*$"
"""Pattern for the name of a metric, which becomes part of a URL path."""


def _convert_to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Count = Annotated[
    str,
    BeforeValidator(_convert_to_text),
    StringConstraints(pattern=COUNT_OR_PERCENT_PATTERN),
    Field(json_schema_extra=_COUNT_SCHEMA | {"pattern": COUNT_OR_PERCENT_PATTERN}),
]
"""Number of replicas, or a percentage of them."""
UnavailableCount = Annotated[
    str,
    BeforeValidator(_convert_to_text),
    StringConstraints(pattern=COUNT_OR_SHARE_PATTERN),
    Field(json_schema_extra=_COUNT_SCHEMA | {"pattern": COUNT_OR_SHARE_PATTERN}),
]
"""Number of replicas, or a percentage of at most 100, as in a Deployment and a
PodDisruptionBudget."""

Labels = Annotated[
    dict[str, Annotated[str, StringConstraints(max_length=63, pattern=_LABEL_VALUE_PATTERN)]],
    Field(max_length=16),
]


def parse_count_or_percent(text: str) -> int | str:
    """Return a count as in Kubernetes' IntOrString: an integer, or a string that ends with %."""
    return text if text.endswith("%") else int(text)


class ScaleMetric(ResourceModel):
    """Metric of the pods in the cluster's custom metrics API."""

    name: Annotated[str, StringConstraints(max_length=253, pattern=_METRIC_NAME_PATTERN)] = Field(
        description="Name of the metric in the custom metrics API, for example "
        "`plimsoll_engine_num_requests_waiting`."
    )
    average_value: PositiveQuantity = Field(
        description="Target value of the metric, averaged over the pods. Must be greater than 0.",
        json_schema_extra=make_validations(
            make_rule(
                "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
                "averageValue must be greater than 0",
            )
        ),
    )


class ScaleTarget(ResourceModel):
    """Target that a HorizontalPodAutoscaler maintains. Exactly one field is set."""

    cpu_percent: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None,
        description="Target CPU utilization, averaged over the pods, as a "
        "percentage of the requested CPU.",
    )
    metric: ScaleMetric | None = Field(default=None, description="Target for a metric of the pods.")

    @model_validator(mode="after")
    def _check_one_target(self) -> Self:
        if (self.cpu_percent is None) == (self.metric is None):
            raise ValueError("autoscaling.target needs exactly one of cpuPercent and metric")
        return self


class TriggerAuthentication(ResourceModel):
    """Credentials of a trigger."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        description="Name of the object."
    )
    kind: Literal["TriggerAuthentication", "ClusterTriggerAuthentication"] = Field(
        default="TriggerAuthentication",
        description="Kind of the object. Defaults to `TriggerAuthentication`.",
    )


class ScaleTrigger(ResourceModel):
    """KEDA trigger, as in a ScaledObject."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=63)] = Field(
        description="Type of KEDA's scaler, for example `prometheus`."
    )
    metadata: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=32)
    ] = Field(description="Settings of the scaler.")
    authentication_ref: TriggerAuthentication | None = Field(
        default=None, description="Credentials for the scaler."
    )


class Autoscaling(ResourceModel):
    """HorizontalPodAutoscaler or KEDA's ScaledObject for the service."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_SERVICE_REPLICAS)] = Field(
        default=1,
        description="Minimum number of replicas. 0 requires `triggers`. Defaults to 1.",
    )
    max_replicas: Annotated[int, Field(ge=1, le=MAX_SERVICE_REPLICAS)] = Field(
        description="Maximum number of replicas."
    )
    target: ScaleTarget | None = Field(
        default=None,
        description="Target that a HorizontalPodAutoscaler maintains. Set exactly one of "
        "`cpuPercent` and `metric`. Required unless `triggers` is set.",
        json_schema_extra=make_validations(
            make_rule(
                "has(self.cpuPercent) != has(self.metric)",
                "autoscaling.target needs exactly one of cpuPercent and metric",
            )
        ),
    )

    triggers: Annotated[list[ScaleTrigger], Field(max_length=8)] = Field(
        default_factory=list,
        description="Triggers of KEDA, in place of `target`. The operator creates a ScaledObject. "
        "If the cluster lacks KEDA, nothing scales, and the condition `ObjectsComplete` is False.",
    )
    cooldown: PositiveDuration = Field(
        default="5m",
        description="With `triggers`, time without an active trigger after which the service is "
        "scaled to zero, rounded up to seconds. Defaults to 5m.",
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.target is None) == (not self.triggers):
            raise ValueError(ONE_SOURCE_MESSAGE)
        if self.min_replicas == 0 and not self.triggers:
            raise ValueError(ZERO_REPLICAS_MESSAGE)
        return self

    @model_validator(mode="after")
    def _check_replica_limits(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"autoscaling.minReplicas {self.min_replicas} must not be more than maxReplicas "
                f"{self.max_replicas}"
            )
        return self


ONE_SOURCE_MESSAGE = "autoscaling needs exactly one of target and triggers"
ZERO_REPLICAS_MESSAGE = "autoscaling.minReplicas 0 requires autoscaling.triggers"
AUTOSCALING_RULES = make_validations(
    make_rule(
        "has(self.target) != (has(self.triggers) && size(self.triggers) > 0)", ONE_SOURCE_MESSAGE
    ),
    make_rule(
        "self.minReplicas > 0 || (has(self.triggers) && size(self.triggers) > 0)",
        ZERO_REPLICAS_MESSAGE,
        fieldPath=".minReplicas",
    ),
    make_rule(
        # An earlier release stored the field as ``max``, which the API server drops now.
        "!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
        "autoscaling.minReplicas must not be more than maxReplicas",
        fieldPath=".minReplicas",
    ),
)


class OnLeak(StrEnum):
    """Reaction of the operator to a new revision that leaks in most of its replicas."""

    CONTINUE = "Continue"
    HOLD = "Hold"
    ROLLBACK = "Rollback"


class RunRevision(StrEnum):
    """Revision that the pods run."""

    SPEC = "Spec"
    LAST_GOOD = "LastGood"


class Rollout(ResourceModel):
    """Settings for replacing old pods by new ones."""

    max_surge: Count | None = Field(
        default=None,
        description="Maximum number of pods above the desired number during a rollout, as a "
        "number or a percentage. Defaults to 1, or to 0 if `maxUnavailable` is not 0 and a new "
        "pod would wait for something that an old pod holds. This can be devices, ports of the "
        "node, or a PersistentVolumeClaim that is neither ReadWriteMany nor only ReadOnlyMany.",
    )
    max_unavailable: UnavailableCount | None = Field(
        default=None,
        description="Maximum number of pods that may be unavailable during a rollout, as a "
        "number or a percentage of at most 100. Defaults to 1 if `maxSurge` is 0 or defaults to "
        "0; otherwise to 0.",
    )
    progress_deadline: PositiveDuration | None = Field(
        default=None,
        description="Time without progress after which the operator reports the "
        "rollout as `Stalled`. Defaults to `engine.startupTimeout` plus 5 minutes.",
    )
    on_leak: OnLeak = Field(
        default=OnLeak.HOLD,
        description="What the operator does when most replicas of a new revision "
        "have the same leak. `Hold` pauses the rollout if it is not complete. `Rollback` "
        "returns to the last good revision; if there is none, it acts as `Hold`. `Continue` "
        "only reports the leak. Defaults to `Hold`.",
    )
    revision: RunRevision = Field(
        default=RunRevision.SPEC,
        description="Revision to run. `Spec` runs the current spec. `LastGood` "
        "returns to the last good revision before it, and stays there until you set this "
        "field to `Spec`. If there is no such revision, the current spec runs. Defaults to "
        "`Spec`.",
    )

    @model_validator(mode="after")
    def _check_pod_limits(self) -> Self:
        if {self.max_surge, self.max_unavailable} <= {"0", "0%"}:
            raise ValueError("rollout.maxSurge and rollout.maxUnavailable must not both be 0")
        return self


ROLLOUT_RULES = make_validations(
    make_rule(
        "!has(self.maxSurge) || !has(self.maxUnavailable) || "
        "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
        "rollout.maxSurge and rollout.maxUnavailable must not both be 0",
    )
)


class Disruption(ResourceModel):
    """PodDisruptionBudget for the replicas."""

    enabled: bool = Field(
        default=True, description="Whether to create a PodDisruptionBudget. Defaults to true."
    )
    max_unavailable: UnavailableCount | None = Field(
        default=None,
        description="Maximum number of replicas that may be unavailable after an "
        "eviction, as a number or a percentage of at most 100. Replicas that are not ready can "
        "always be evicted. Defaults to `supervision.maxUnavailable`.",
    )


class NetworkPolicy(ResourceModel):
    """NetworkPolicy that allows traffic only from the listed peers."""

    enabled: bool = Field(
        default=True,
        description="Whether to create a NetworkPolicy. Policies are additive: "
        "another policy may allow more traffic. Defaults to true.",
    )
    clients: Annotated[list[PreservedObject], Field(max_length=32)] = Field(
        default_factory=list,
        description="Peers (`podSelector`, `namespaceSelector`, `ipBlock`) that may "
        "reach the OpenAI API. If empty, all peers may reach it.",
    )
    monitoring: Annotated[list[PreservedObject], Field(max_length=32)] = Field(
        default_factory=list,
        description="Peers that may scrape the metrics of the supervisor and, on "
        "the port of the OpenAI API, of the engine. The operator also reads the "
        "supervisor's metrics, so include it in the list. If empty, all peers may reach the "
        "supervisor's metrics, and only `clients` may reach the engine's.",
    )
    probes: Annotated[list[PreservedObject], Field(max_length=32)] = Field(
        default_factory=list,
        description="Peers that may reach the supervisor's probe port. The kubelet "
        "always can, because no policy blocks traffic from the pod's own node. If empty, no "
        "other peer can.",
    )


class Monitor(ResourceModel):
    """Object for the Prometheus operator."""

    enabled: bool = Field(
        default=False,
        description="Whether to create the object. If the cluster lacks the API of "
        "the Prometheus operator, Plimsoll creates nothing and sets the condition "
        "`ObjectsComplete` to False. Defaults to false.",
    )
    labels: Labels = Field(
        default_factory=dict,
        description="Labels of the object, by which an instance of Prometheus selects the object.",
    )


class PodMonitor(Monitor):
    """PodMonitor for the engine and the supervisor."""

    interval: PositiveDuration = Field(
        default="15s", description="Time between two scrapes. Defaults to 15s."
    )


class Observability(ResourceModel):
    """Objects for the Prometheus operator."""

    pod_monitor: PodMonitor = Field(
        default_factory=PodMonitor,
        description="PodMonitor that makes a Prometheus scrape the engine and the supervisor.",
    )
    prometheus_rule: Monitor = Field(
        default_factory=Monitor,
        description="PrometheusRule with alerts for the memory budgets of this service.",
    )


class ServiceOptions(ResourceModel):
    """Services in front of the replicas."""

    headless: bool = Field(
        default=False,
        description="Whether to create a headless Service, named NAME-replicas, "
        "that resolves to the address of each ready replica. Defaults to false.",
    )


_HOST_PATTERN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DomainName = Annotated[
    str,
    StringConstraints(
        max_length=253, pattern=rf"^{_HOST_PATTERN}(\.{_HOST_PATTERN})*$", min_length=1
    ),
]


class GatewayParent(ResourceModel):
    """Gateway that routes requests to the service."""

    name: _DomainName = Field(description="Name of the Gateway.")
    namespace: (
        Annotated[str, StringConstraints(max_length=63, pattern=rf"^{_HOST_PATTERN}$")] | None
    ) = Field(default=None, description="Namespace of the Gateway. Defaults to the service's.")
    section_name: _DomainName | None = Field(
        default=None,
        description="Name of the Gateway's listener. If unset, requests from all "
        "listeners are routed.",
    )


class EndpointPicker(ResourceModel):
    """Service of an endpoint picker, which chooses the replica for each request."""

    name: _DomainName = Field(description="Name of the Service, in the service's namespace.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=9002, description="Port of the Service. Defaults to 9002."
    )
    failure_mode: Literal["FailOpen", "FailClose"] = Field(
        default="FailClose",
        description="What the gateway does if the endpoint picker does not answer: choose any "
        "replica (`FailOpen`), or refuse the request (`FailClose`). Defaults to `FailClose`.",
    )


class Gateway(ResourceModel):
    """InferencePool of the replicas, and an HTTPRoute to it."""

    parent_refs: Annotated[list[GatewayParent], Field(min_length=1, max_length=8)] = Field(
        description="Gateways that route requests to the service. Their names must differ.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    hostnames: Annotated[
        list[
            Annotated[
                str,
                StringConstraints(
                    min_length=1,
                    max_length=253,
                    pattern=rf"^(\*\.)?{_HOST_PATTERN}(\.{_HOST_PATTERN})*$",
                ),
            ]
        ],
        Field(max_length=16),
    ] = Field(
        default_factory=list,
        description="Host names of the requests to route. If empty, the Gateway's listeners "
        "determine the host names.",
    )
    endpoint_picker: EndpointPicker = Field(
        description="Endpoint picker of the pool. Plimsoll does not install it."
    )

    @model_validator(mode="after")
    def _check_gateways_unique(self) -> Self:
        if len({one.name for one in self.parent_refs}) < len(self.parent_refs):
            raise ValueError(
                "gateway.parentRefs contains a Gateway twice: remove one of the entries"
            )
        return self
