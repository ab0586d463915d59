"""Status of InferenceService, written by the operator."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from plimsoll_api.schema import ResourceModel


class ConditionType(StrEnum):
    """Conditions of an InferenceService; ``Ready`` summarizes the others, as kstatus expects."""

    READY = "Ready"
    ENGINE_READY = "EngineReady"
    SUPERVISOR_READY = "SupervisorReady"
    MEMORY_WITHIN_BUDGET = "MemoryWithinBudget"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    PROGRESSING = "Progressing"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    OOM_KILLED = "OOMKilled"
    CRASH_LOOPING = "CrashLooping"
    SUSPECT_REVISION = "SuspectRevision"
    SLOW_LEAK = "SlowLeak"
    MEMORY_NEAR_LIMIT = "MemoryNearLimit"
    ENGINE_OBSERVED = "EngineObserved"
    OBJECTS_COMPLETE = "ObjectsComplete"
    LEAK_FREE = "LeakFree"


MAX_STATUS_CONDITIONS = 32


class Leaks(StrEnum):
    """Whether a revision leaks."""

    YES = "Yes"
    NO = "No"
    UNKNOWN = "Unknown"


class RevisionVerdict(ResourceModel):
    """Verdict on whether a revision leaks, for canary tools and people."""

    revision: Annotated[str, StringConstraints(max_length=63)] = Field(
        description="Hash of the revision."
    )
    leaks: Leaks = Field(
        description="`Yes` if most of its replicas have the same confirmed leak. `No` if most of "
        "them were observed under load and stay within their leak budgets. Otherwise `Unknown`."
    )
    message: Annotated[str, StringConstraints(max_length=1024)] = Field(
        description="Evidence for the verdict, or what is still missing for a verdict."
    )
    minutes_left: int | None = Field(
        default=None,
        description="Minutes of further observation after which the verdict becomes `No` if "
        "nothing changes, rounded up. Absent if time alone cannot change the verdict.",
    )


class Verdicts(ResourceModel):
    """Verdicts on the revisions of a service or workload."""

    verdicts: Annotated[list[RevisionVerdict], Field(max_length=4)] | None = Field(
        default=None,
        description="Verdicts on the revisions that have pods, newest first. At most 4.",
    )


class Condition(ResourceModel):
    """Condition, as in the Kubernetes API conventions."""

    type: Annotated[str, StringConstraints(max_length=316)] = Field(
        description="Type of the condition, in CamelCase."
    )
    status: Literal["True", "False", "Unknown"] = Field(
        description="Status of the condition: True, False or Unknown."
    )
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Reason for the status, as one CamelCase word."
    )
    message: Annotated[str, StringConstraints(max_length=32768)] = Field(
        default="", description="Human-readable details."
    )
    last_transition_time: str = Field(
        description="Time at which `status` last changed.",
        json_schema_extra={"format": "date-time"},
    )
    observed_generation: int = Field(
        description="Generation of the spec for which the condition was set.",
        json_schema_extra={"format": "int64"},
    )


class MemoryStatus(ResourceModel):
    """Memory of the worst replica. Absent values are unknown."""

    host_consumed_percent: int | None = Field(
        default=None,
        description="Share of the host growth budget that is used in the worst "
        "replica, in percent, rounded down to a multiple of 5. Absent if unknown.",
    )
    device_consumed_percent: int | None = Field(
        default=None,
        description="Share of the device growth budget that is used in the worst "
        "replica, in percent, rounded down to a multiple of 5. Absent if unknown.",
    )
    replica: str | None = Field(
        default=None, description="Name of the pod that uses the largest share of a budget."
    )


class RecommendedMemory(ResourceModel):
    """Recommended amount of host memory, as the request or the limit of the engine's container."""

    memory: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="Amount of memory as a quantity, for example `12Gi`."
    )


class RecommendedResources(ResourceModel):
    """Requests and limits for the engine's container."""

    requests: RecommendedMemory = Field(
        description="The largest amount of memory that a healthy replica used."
    )
    limits: RecommendedMemory = Field(
        description="Memory use with all declared pools full, plus the leak budget."
    )


class Recommendation(ResourceModel):
    """Recommended memory of a revision, computed from the memory use of its replicas."""

    message: Annotated[str, StringConstraints(max_length=1024)] = Field(
        description="Summary of the memory use, the pools, the growth per request, and the time "
        "until the limit is reached."
    )
    revision: Annotated[str, StringConstraints(max_length=63)] = Field(
        description="Hash of the revision."
    )
    time: str = Field(
        description="Time of the last change, at most once an hour.",
        json_schema_extra={"format": "date-time"},
    )
    resources: RecommendedResources | None = Field(
        default=None,
        description="Requests and limits to set for the engine's container. Absent if host memory "
        "is unknown.",
    )


class Revisions(ResourceModel):
    """Revisions of the pods, as hashes. The name of a ControllerRevision ends with its hash."""

    update: str | None = Field(default=None, description="Revision of the current spec.")
    current: str | None = Field(
        default=None, description="Newest revision that was rolled out completely."
    )
    previous: str | None = Field(
        default=None, description="Newest revision in `good` other than `current`."
    )
    good: Annotated[list[str], Field(max_length=2)] = Field(
        default_factory=list,
        description="Good revisions, newest first. A good revision has run in all replicas, did "
        "not leak in most of them, and was not rolled back.",
    )


class SuspectRevision(ResourceModel):
    """Revision that leaks in most of its replicas."""

    revision: str = Field(description="Hash of the revision.")
    leak: str = Field(description="Kind and segment of the leak that the replicas share.")
    since: str = Field(
        description="Time by which the leak had begun in most replicas.",
        json_schema_extra={"format": "date-time"},
    )
    leaking_replicas: int = Field(description="Number of replicas that have the leak.")
    replicas: int = Field(description="Number of replicas of this revision.")
    action: Literal["None", "Reported", "Held", "RolledBack"] = Field(
        description="What the operator did about the rollout. `Held`: it paused the rollout, or "
        "for a policy, it requests no restart of the workload. `RolledBack`: it returned to the "
        "last good revision. `Reported` and `None`: it changed nothing."
    )
    changed: Annotated[
        list[Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=16)
    ] = Field(
        default_factory=list,
        description="Fields of the spec that differ from the last good revision, one per item. "
        "At most 16.",
    )


class InferenceServiceStatus(Verdicts):
    """Observed state of an InferenceService."""

    observed_generation: int | None = Field(
        default=None,
        description="Generation of the spec that this status describes.",
        json_schema_extra={"format": "int64"},
    )
    replicas: int | None = Field(default=None, description="Number of replicas that exist.")
    ready_replicas: int | None = Field(
        default=None, description="Number of replicas that are ready for requests."
    )
    desired_replicas: int | None = Field(
        default=None,
        description="Desired number of replicas: `spec.replicas`, or the number "
        "that an autoscaler set.",
    )
    selector: str | None = Field(
        default=None, description="Label selector of the pods, for the scale subresource."
    )
    url: str | None = Field(default=None, description="URL of the OpenAI API inside the cluster.")
    conditions: Annotated[list[Condition], Field(max_length=MAX_STATUS_CONDITIONS)] | None = Field(
        default=None,
        description="Conditions of the service, one for each type.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    memory: MemoryStatus | None = Field(default=None, description="Memory of the worst replica.")
    recommendation: Recommendation | None = Field(
        default=None,
        description="Memory use of the newest revision, and the requests and limits to set. "
        "Absent until a replica has been observed.",
    )
    revisions: Revisions | None = Field(
        default=None,
        description="Revisions of the pods, each identified by its hash. The names "
        "of ControllerRevisions end in this hash.",
    )
    suspect_revision: SuspectRevision | None = Field(
        default=None,
        description="Present if most replicas of the current revision have the same leak.",
    )
    drained: int | None = Field(
        default=None,
        description="Number of replicas that a person took out of service. Absent if unknown.",
    )
    restarts: int | None = Field(
        default=None,
        description="Number of successful restarts by supervisors, counted over the "
        "LeakIncidents that still exist.",
    )
    open_incidents: int | None = Field(
        default=None, description="Number of LeakIncidents that have not ended."
    )
    last_incident: str | None = Field(default=None, description="Name of the newest LeakIncident.")
