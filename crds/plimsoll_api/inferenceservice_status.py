"""InferenceService, status side: what the operator saw."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from plimsoll_api.schema import Model


class ConditionType(StrEnum):
    """Conditions of an InferenceService. ``Ready`` sums them up (kstatus-compatible)."""

    READY = "Ready"
    ENGINE_READY = "EngineReady"
    SUPERVISOR_READY = "SupervisorReady"
    MEMORY_WITHIN_BUDGET = "MemoryWithinBudget"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    PROGRESSING = "Progressing"
    STALLED = "Stalled"
    OUT_OF_MEMORY_KILLED = "OutOfMemoryKilled"
    CRASH_LOOPING = "CrashLooping"
    SUSPECT_REVISION = "SuspectRevision"
    OBJECTS_COMPLETE = "ObjectsComplete"


class Condition(Model):
    """One condition, as in the Kubernetes API conventions."""

    type: Annotated[str, StringConstraints(max_length=316)] = Field(
        description="What the condition speaks of."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Why, as one CamelCase word for programs."
    )
    message: Annotated[str, StringConstraints(max_length=32768)] = Field(
        default="", description="Why, in a sentence for people."
    )
    last_transition_time: str = Field(
        description="When `status` last changed.", json_schema_extra={"format": "date-time"}
    )
    observed_generation: int = Field(
        description="Generation of the spec that the condition was set for.",
        json_schema_extra={"format": "int64"},
    )


class MemoryStatus(Model):
    """Memory of the worst replica. Absent figures are unknown."""

    host_consumed_percent: int | None = Field(
        default=None,
        description="Consumed part of the host growth budget, in percent, in steps of 5.",
    )
    device_consumed_percent: int | None = Field(
        default=None,
        description="Consumed part of the device growth budget, in percent, in steps of 5.",
    )
    replica: str | None = Field(default=None, description="Pod that consumed most.")


class Revisions(Model):
    """Revisions of the pods, by hash: the names of ControllerRevisions end in it."""

    update: str | None = Field(default=None, description="That of the present spec.")
    current: str | None = Field(
        default=None, description="The last one that was rolled out completely."
    )
    previous: str | None = Field(default=None, description="The one before `current`.")


class SuspectRevision(Model):
    """A revision that leaks in most of its replicas."""

    revision: str = Field(description="Its hash.")
    leak: str = Field(description="Which leak: kind and segment.")
    since: str = Field(
        description="When it had begun in most replicas.", json_schema_extra={"format": "date-time"}
    )
    leaking_replicas: int = Field(description="Replicas that have it.")
    replicas: int = Field(description="Replicas of this revision.")
    action: Literal["None", "Reported", "Held", "RolledBack"] = Field(
        description="What was done about the roll-out."
    )
    changed: Annotated[
        list[Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=16)
    ] = Field(
        default_factory=list,
        description="What differs from the last good revision, field by field.",
    )


class InferenceServiceStatus(Model):
    """The observed state."""

    observed_generation: int | None = Field(
        default=None,
        description="Generation of the spec that this status is about.",
        json_schema_extra={"format": "int64"},
    )
    replicas: int | None = Field(default=None, description="Replicas that exist.")
    ready_replicas: int | None = Field(default=None, description="Replicas that take requests.")
    selector: str | None = Field(
        default=None, description="Label selector of the pods, for scaling."
    )
    url: str | None = Field(
        default=None, description="Where the OpenAI API answers inside the cluster."
    )
    conditions: Annotated[list[Condition], Field(max_length=16)] | None = Field(
        default=None,
        description="Conditions, one of each type.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    memory: MemoryStatus | None = Field(default=None, description="Memory of the worst replica.")
    revisions: Revisions | None = Field(default=None, description="Revisions of the pods.")
    suspect_revision: SuspectRevision | None = Field(
        default=None, description="Set when most replicas of the present revision leak the same."
    )
    restarts: int | None = Field(
        default=None,
        description="Restarts by supervisors that succeeded, in the incidents still kept.",
    )
    open_incidents: int | None = Field(
        default=None, description="LeakIncidents that have not ended."
    )
    last_incident: str | None = Field(default=None, description="Name of the newest LeakIncident.")
