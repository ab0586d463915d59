"""Status of SupervisionPolicy, written by the operator."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from plimsoll_api.inferenceservice_status import (
    MAX_STATUS_CONDITIONS,
    Condition,
    MemoryStatus,
    Recommendation,
    SuspectRevision,
    Verdicts,
)
from plimsoll_api.roles import PodRole
from plimsoll_api.schema import ResourceModel

MAX_REFUSED_PODS = 16
MAX_STATUS_REASON_CHARS = 512
MAX_SHOWN_WORKLOADS = 16
MAX_UNRELATED_REFUSALS = 8


class PolicyCondition(StrEnum):
    """Conditions of a SupervisionPolicy."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    CONFLICTING = "Conflicting"
    SUSPECT_REVISION = "SuspectRevision"
    SLOW_LEAK = "SlowLeak"
    MEMORY_NEAR_LIMIT = "MemoryNearLimit"
    ENGINE_OBSERVED = "EngineObserved"
    INJECTION_STOPPED = "InjectionStopped"
    LEAK_FREE = "LeakFree"


class RefusedPod(ResourceModel):
    """Selected pod that cannot be supervised."""

    pod: Annotated[str, StringConstraints(max_length=253)] = Field(description="Name of the pod.")
    reason: Annotated[str, StringConstraints(max_length=MAX_STATUS_REASON_CHARS)] = Field(
        description="Why the pod has no supervisor, and what to do about it."
    )


class PolicyWorkload(Verdicts):
    """Workload that owns selected pods."""

    api_group: Annotated[str, StringConstraints(max_length=253)] | None = Field(
        default=None,
        description="API group of the workload, for example `apps`. Absent for the core group.",
    )
    kind: Annotated[str, StringConstraints(max_length=63)] = Field(
        description="Kind of the workload, for example `Deployment`. `Pod` for all pods that no "
        "workload owns."
    )
    name: Annotated[str, StringConstraints(max_length=253)] | None = Field(
        default=None,
        description="Name of the workload. Absent for the pods that no workload owns.",
    )
    selected: int = Field(
        description="Number of the workload's pods that match the selector or have a supervisor of "
        "the policy."
    )
    supervised: int = Field(
        description="Number of the workload's pods with a supervisor of this policy that "
        "observes the engine."
    )
    waiting_for_restart: int = Field(
        description="Number of the workload's pods that get a supervisor when they are recreated."
    )
    open_incidents: int = Field(
        description="Number of the workload's LeakIncidents that have not ended."
    )
    consumed_percent: int | None = Field(
        default=None,
        description="Largest share of a growth budget that one of the workload's pods has used, "
        "in percent, rounded down to a multiple of 5. Absent if unknown.",
    )
    message: Annotated[str, StringConstraints(max_length=MAX_STATUS_REASON_CHARS)] | None = Field(
        default=None,
        description="With `rollout: Restart`, what the waiting pods wait for.",
    )
    engine: Annotated[str, StringConstraints(max_length=MAX_STATUS_REASON_CHARS)] | None = Field(
        default=None,
        description="Engine that was detected in the workload's pods, its container, and the "
        "evidence.",
    )
    roles: list[PodRole] | None = Field(
        default=None,
        description="Roles of the workload's pods in disaggregated or multi-node serving. Absent "
        "if no pod has a role.",
        max_length=len(PodRole),
    )
    recommendation: Recommendation | None = Field(
        default=None,
        description="Memory use of the workload's newest revision, and the requests and limits "
        "to set. Absent until a pod has been observed.",
    )
    suspect_revision: SuspectRevision | None = Field(
        default=None,
        description="Present if most replicas of one revision have the same leak.",
    )


class InjectionStop(ResourceModel):
    """Stop of the injection: the reason why new pods no longer get a supervisor."""

    pod: Annotated[str, StringConstraints(max_length=253)] = Field(
        description="One of the pods that do not start, or the owner of the pods that the API "
        "server refuses."
    )
    reason: Annotated[str, StringConstraints(max_length=MAX_STATUS_REASON_CHARS)] = Field(
        description="Container and image that do not start, with the kubelet's message, or the "
        "reason why the API server refuses the pods."
    )
    time: str = Field(
        description="Time at which the injection stopped.",
        json_schema_extra={"format": "date-time"},
    )
    generation: int = Field(
        description="Generation of the policy when the injection stopped. A new generation "
        "resumes the injection.",
        json_schema_extra={"format": "int64"},
    )
    retry: Annotated[str, StringConstraints(max_length=256)] = Field(
        default="",
        description="Value of the annotation `plimsoll.dev/retry-injection` when the injection "
        "stopped. A new value resumes the injection.",
    )
    refusal: Annotated[str, StringConstraints(max_length=64)] = Field(
        default="",
        description="Identifies the pods' owner and the API server's answer. Present if the API "
        "server refuses pods with a supervisor, for example because of a quota.",
    )


class Injection(ResourceModel):
    """State of the injection of supervisors into new pods."""

    images: Annotated[str, StringConstraints(max_length=1026)] = Field(
        description="Images that are added to new pods: the supervisor's image, and the probe's "
        "image if it differs."
    )
    proven: bool = Field(
        default=False,
        description="Whether a pod of the policy has run with these images. Until then, only a "
        "few pods at a time get a supervisor, and the others start without one.",
    )
    waiting: int = Field(
        default=0,
        description="Number of replicas whose pods were created with these images but have not yet "
        "run with them.",
    )
    since: str | None = Field(
        default=None,
        description="Time at which the injection was last resumed. Pods that are older do not "
        "count.",
        json_schema_extra={"format": "date-time"},
    )
    stopped: InjectionStop | None = Field(
        default=None,
        description="Present if several pods do not start with these images, or if the API "
        "server refuses pods with a supervisor. New pods then start without a supervisor, until "
        "you change the policy or its annotation `plimsoll.dev/retry-injection`, or until the "
        "operator's images change.",
    )
    refused_anyway: Annotated[
        list[Annotated[str, StringConstraints(max_length=64)]],
        Field(max_length=MAX_UNRELATED_REFUSALS),
    ] = Field(
        default_factory=list,
        description="Refusals that also affect pods without a supervisor. They do not stop the "
        "injection.",
    )


class SupervisionPolicyStatus(ResourceModel):
    """Observed state of a SupervisionPolicy."""

    observed_generation: int | None = Field(
        default=None,
        description="Generation of the spec that this status describes.",
        json_schema_extra={"format": "int64"},
    )
    selected: int | None = Field(
        default=None,
        description="Number of pods that match the selector or have a supervisor of the policy.",
    )
    supervised: int | None = Field(
        default=None,
        description="Number of selected pods with a supervisor of this policy that observes the "
        "engine.",
    )
    waiting_for_restart: int | None = Field(
        default=None,
        description="Number of selected pods that are older than the policy, or that started while "
        "the webhook did not answer. They get a supervisor when they are recreated.",
    )
    refused: int | None = Field(
        default=None, description="Number of selected pods that this policy does not supervise."
    )
    refusals: Annotated[list[RefusedPod], Field(max_length=MAX_REFUSED_PODS)] | None = Field(
        default=None,
        description="Refused pods with the reasons, ordered by name. At most 16, even if "
        "`refused` is larger.",
    )
    open_incidents: int | None = Field(
        default=None, description="Number of LeakIncidents of the policy that have not ended."
    )
    injection: Injection | None = Field(
        default=None, description="State of the injection of supervisors into new pods."
    )
    memory: MemoryStatus | None = Field(
        default=None, description="Memory of the worst supervised pod."
    )
    drained: int | None = Field(
        default=None,
        description="Number of supervised pods that a person took out of service. Absent if "
        "unknown.",
    )
    workload_count: int | None = Field(
        default=None, description="Number of workloads that own selected pods."
    )
    workloads: Annotated[list[PolicyWorkload], Field(max_length=MAX_SHOWN_WORKLOADS)] | None = (
        Field(
            default=None,
            description="Workloads that own selected pods: first those with a suspect revision, "
            "then the others by their used share of a growth budget, largest first. At most 16.",
        )
    )
    conditions: Annotated[list[Condition], Field(max_length=MAX_STATUS_CONDITIONS)] | None = Field(
        default=None,
        description="Conditions of the policy, one for each type: `Ready`, `Reconciling`, "
        "`Stalled`, `Conflicting`, `SuspectRevision`, `SlowLeak`, `MemoryNearLimit`, "
        "`EngineObserved`, `InjectionStopped` and `LeakFree`.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
