"""LeakIncident: the story of one leak or stall, written by the replica's supervisor.

Its times are RFC 3339, sizes are bytes. The supervisor writes these fields from a struct of its
own; a test holds the two against each other.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from plimsoll_api.schema import API_VERSION, Model, rule, validations

KIND = "LeakIncident"
PLURAL = "leakincidents"
SHORT_NAME = "plinc"


class IncidentKind(StrEnum):
    """What went wrong."""

    HOST_GROWTH = "HostGrowth"
    DEVICE_GROWTH = "DeviceGrowth"
    ORPHAN_DEVICE_MEMORY = "OrphanDeviceMemory"
    STALL = "Stall"
    OUT_OF_MEMORY_KILL = "OutOfMemoryKill"
    CAPACITY_LOSS = "CapacityLoss"
    CRASH_LOOP = "CrashLoop"


class IncidentPhase(StrEnum):
    """Where an incident stands. The last three are ends."""

    OPEN = "Open"
    CONFIRMED = "Confirmed"
    TRIMMING = "Trimming"
    AWAITING_SLOT = "AwaitingSlot"
    DRAINING = "Draining"
    RESTARTING = "Restarting"
    VERIFYING = "Verifying"
    RESOLVED = "Resolved"
    UNRESOLVED = "Unresolved"
    SUPPRESSED = "Suppressed"


ENDED = frozenset({IncidentPhase.RESOLVED, IncidentPhase.UNRESOLVED, IncidentPhase.SUPPRESSED})

_Name = Annotated[str, StringConstraints(max_length=253)]
_Text = Annotated[str, StringConstraints(max_length=4096)]
_TIME: dict[str, Any] = {"format": "date-time"}
_INT64: dict[str, Any] = {"format": "int64"}


class LeakIncidentSpec(Model):
    """Which incident it is. Nothing of it changes after creation."""

    service: _Name = Field(description="The InferenceService.")
    pod: _Name = Field(description="The replica's pod.")
    container: _Name = Field(description="Container of the pod that grew or stalled.")
    epoch: _Name = Field(description="Epoch of the engine at the beginning, BOOT_ID:NUMBER.")
    opened_at: str = Field(description="When it began.", json_schema_extra=_TIME)
    kind: IncidentKind = Field(description="What went wrong.")


class IncidentTrigger(Model):
    """What the growth follows: a hypothesis."""

    counter: _Name = Field(
        description="The engine's counter: requests, aborts, errors, images, audios,"
        " prompt_tokens, generated_tokens, distinct_prompts, adapters; or time."
    )
    bytes_each: int = Field(
        description="Growth for each of its events; for time, each hour.",
        json_schema_extra=_INT64,
    )
    confidence: Annotated[float, Field(ge=0, le=1)] = Field(
        description="How sure the supervisor is of it, from 0 to 1."
    )


class IncidentAttribution(Model):
    """Which memory grew."""

    segment: _Name | None = Field(default=None, description="Segment of memory that grew.")
    process: _Name | None = Field(default=None, description="Role of the process that holds it.")
    bytes: int | None = Field(
        default=None, description="Unexplained growth.", json_schema_extra=_INT64
    )
    bytes_per_hour: int | None = Field(
        default=None, description="Rate of the growth over time.", json_schema_extra=_INT64
    )
    bytes_per_request: int | None = Field(
        default=None, description="Rate of the growth over requests.", json_schema_extra=_INT64
    )
    trigger: IncidentTrigger | None = Field(
        default=None, description="What the growth follows, as a hypothesis."
    )
    confidence: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="How sure the supervisor is, from 0 to 1."
    )
    evidence: Annotated[list[_Text], Field(max_length=32)] | None = Field(
        default=None, description="What the judgement rests on, one sentence each."
    )


class TimelineStep(Model):
    """One thing that was done, or would have been."""

    time: str = Field(description="When it was done.", json_schema_extra=_TIME)
    step: _Name = Field(description="What was done.")
    outcome: _Name = Field(description="What became of it.")
    before_bytes: int | None = Field(
        default=None, description="Memory of the replica before.", json_schema_extra=_INT64
    )
    after_bytes: int | None = Field(
        default=None, description="Memory of the replica after.", json_schema_extra=_INT64
    )
    message: _Text | None = Field(default=None, description="More about it, for people.")


class LeakIncidentStatus(Model):
    """How it goes."""

    phase: IncidentPhase | None = Field(default=None, description="Where the incident stands.")
    attribution: IncidentAttribution | None = Field(default=None, description="Which memory grew.")
    timeline: Annotated[list[TimelineStep], Field(max_length=128)] | None = Field(
        default=None, description="What was done, oldest first."
    )
    outcome: _Name | None = Field(default=None, description="How it ended, as one CamelCase word.")
    message: _Text | None = Field(default=None, description="How it ended or goes, for people.")
    confirmed_at: str | None = Field(
        default=None, description="When the supervisor stood by it.", json_schema_extra=_TIME
    )
    ended_at: str | None = Field(
        default=None, description="When it ended.", json_schema_extra=_TIME
    )
    returned_bytes: int | None = Field(
        default=None,
        description="Memory that came back in all.",
        json_schema_extra=_INT64,
    )
    consumed_percent: int | None = Field(
        default=None, description="Consumed part of the growth budget, in percent."
    )
    diagnostics: Annotated[list[_Text], Field(max_length=32)] | None = Field(
        default=None, description="Saved diagnostics, as paths in the supervisor's container."
    )


class IncidentMeta(Model):
    """The part of an incident's metadata that is read here; the rest is ignored."""

    model_config = Model.model_config | {"extra": "ignore"}

    name: str
    namespace: str = "default"
    creation_timestamp: str | None = None


class LeakIncident(Model):
    """Memory that grew without explanation, or an engine that stalled, and what was done."""

    api_version: Literal["plimsoll.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["LeakIncident"] = KIND  # type: ignore[assignment]
    metadata: IncidentMeta
    spec: LeakIncidentSpec = Field(
        description="Which incident it is.",
        json_schema_extra=validations(
            rule("self == oldSelf", "spec is immutable: it says which incident this is")
        ),
    )
    status: LeakIncidentStatus | None = Field(
        default=None, description="How it goes, written by the supervisor."
    )
