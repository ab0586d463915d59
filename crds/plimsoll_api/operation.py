"""The part of an InferenceService about how it is run: scaling, roll-outs, network, monitoring."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from plimsoll_api.schema import (
    Model,
    PositiveDuration,
    PositiveQuantity,
    PreservedObject,
    rule,
    validations,
)

MAX_REPLICAS = 1000
COUNT_PATTERN = r"^([0-9]{1,4}|[0-9]{1,3}%)$"
_LABEL = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Count = Annotated[
    str,
    BeforeValidator(_as_text),
    StringConstraints(pattern=COUNT_PATTERN),
    Field(
        json_schema_extra={
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": COUNT_PATTERN,
            "minimum": 0,
            "maximum": 9999,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A number of replicas, or a percentage of them."""

Labels = Annotated[
    dict[str, Annotated[str, StringConstraints(max_length=63, pattern=_LABEL)]],
    Field(max_length=16),
]


def count(text: str) -> int | str:
    """As Kubernetes takes it: a whole number, or a text that ends in %."""
    return text if text.endswith("%") else int(text)


class ScaleMetric(Model):
    """A metric of the pods that the cluster's custom metrics API serves."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        description="Name of the metric, for example `plimsoll_engine_requests_waiting`."
    )
    average_value: PositiveQuantity = Field(
        description="Wanted average over the pods.",
        json_schema_extra=validations(
            rule(
                "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
                "averageValue must be more than 0",
            )
        ),
    )


class ScaleTarget(Model):
    """What the number of replicas follows: one of the two."""

    cpu_percent: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None, description="Average use of the CPU, in percent of what is requested."
    )
    metric: ScaleMetric | None = Field(default=None, description="Average of a metric of the pods.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.cpu_percent is None) == (self.metric is None):
            raise ValueError("autoscaling.target needs one of cpuPercent and metric")
        return self


class Autoscaling(Model):
    """A HorizontalPodAutoscaler. (KEDA needs none of this: point a ScaledObject at the
    InferenceService, which has a scale subresource.)"""

    min: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = Field(
        default=1, description="The fewest replicas."
    )
    max: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = Field(description="The most replicas.")
    target: ScaleTarget = Field(
        description="What the number of replicas follows.",
        json_schema_extra=validations(
            rule(
                "has(self.cpuPercent) != has(self.metric)",
                "autoscaling.target needs one of cpuPercent and metric",
            )
        ),
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"autoscaling.min {self.min} must not be more than max {self.max}")
        return self


AUTOSCALING_RULES = validations(
    rule("self.min <= self.max", "autoscaling.min must not be more than max", fieldPath=".min")
)


class OnLeak(StrEnum):
    """What becomes of a roll-out whose new revision leaks in most of its replicas."""

    CONTINUE = "Continue"
    HOLD = "Hold"
    ROLLBACK = "Rollback"


class RunRevision(StrEnum):
    """Which revision of the pods runs."""

    SPEC = "Spec"
    LAST_GOOD = "LastGood"


class Rollout(Model):
    """How new pods take the place of old ones."""

    max_surge: Count | None = Field(
        default=None,
        description="Pods above the wanted number, as a number or a percentage. Default: 1, with "
        "devices 0.",
    )
    max_unavailable: Count | None = Field(
        default=None,
        description="Pods that may be missing, as a number or a percentage. Default: 0, with "
        "devices 1.",
    )
    progress_deadline: PositiveDuration | None = Field(
        default=None,
        description="Without progress for this long a roll-out is `Stalled`. Default: "
        "`engine.startupTimeout` and 5 minutes.",
    )
    on_leak: OnLeak = Field(
        default=OnLeak.HOLD,
        description="When the same leak shows in most replicas of a new revision: `Hold` stops the "
        "roll-out where it is, `Rollback` also returns to the last good revision, `Continue` does "
        "nothing but say so.",
    )
    revision: RunRevision = Field(
        default=RunRevision.SPEC,
        description="`Spec` runs what the spec says. `LastGood` goes back to the last revision "
        "before it that was rolled out completely, and stays there until this is `Spec` again.",
    )

    @model_validator(mode="after")
    def _can_move(self) -> Self:
        if {self.max_surge, self.max_unavailable} <= {"0", "0%"}:
            raise ValueError("rollout.maxSurge and rollout.maxUnavailable must not both be 0")
        return self


ROLLOUT_RULES = validations(
    rule(
        "!has(self.maxSurge) || !has(self.maxUnavailable) || "
        "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
        "rollout.maxSurge and rollout.maxUnavailable must not both be 0",
    )
)


class Disruption(Model):
    """A PodDisruptionBudget for the replicas."""

    enabled: bool = Field(default=True, description="Whether there is one.")
    max_unavailable: Count | None = Field(
        default=None,
        description="Replicas that evictions may take at once, as a number or a percentage. "
        "Default: `supervision.maxUnavailable`.",
    )


class NetworkPolicy(Model):
    """A NetworkPolicy that lets in what is named here and nothing else."""

    enabled: bool = Field(default=False, description="Whether there is one.")
    clients: Annotated[list[PreservedObject], Field(max_length=32)] = Field(
        default_factory=list,
        description="Peers (`podSelector`, `namespaceSelector`, `ipBlock`) that may use the OpenAI "
        "API. Default: everybody.",
    )
    monitoring: Annotated[list[PreservedObject], Field(max_length=32)] = Field(
        default_factory=list,
        description="Peers that may read the supervisor's metrics, which the operator does as "
        "well. Default: everybody.",
    )


class Monitor(Model):
    """An object for the Prometheus operator."""

    enabled: bool = Field(
        default=False,
        description="Whether there is one. Without the API of the Prometheus operator nothing is "
        "made, and the condition `ObjectsComplete` says so.",
    )
    labels: Labels = Field(
        default_factory=dict, description="Labels by which a Prometheus selects it."
    )


class PodMonitor(Monitor):
    """Tells a Prometheus to scrape engine and supervisor."""

    interval: PositiveDuration = Field(default="15s", description="Time between scrapes.")


class Observability(Model):
    """What the Prometheus operator gets."""

    pod_monitor: PodMonitor = Field(
        default_factory=PodMonitor, description="Scraping of engine and supervisor."
    )
    prometheus_rule: Monitor = Field(
        default_factory=Monitor, description="Alerts for this service's budgets."
    )


class ServiceOptions(Model):
    """The Services in front of the replicas."""

    headless: bool = Field(
        default=False,
        description="Adds a headless Service NAME-replicas, by which a client finds each replica "
        "that is ready.",
    )
