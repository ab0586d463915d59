"""LeakIncident: one leak or stall, and what was done about it, written by the replica's supervisor.

Times are RFC 3339, sizes are bytes. The supervisor writes these structs, the command line reads
them, and the CRD is generated from them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from plimsoll_api.cel import Rule, rule
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.manifest import written

MAX_STATUS_TEXT = 4096
MAX_SENTENCES = 32
MAX_TIMELINE = 128

_Name = Annotated[str, msgspec.Meta(max_length=253)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_STATUS_TEXT)]
_Texts = Annotated[list[_Text], msgspec.Meta(max_length=MAX_SENTENCES)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_TIME: dict[str, Any] = {"format": "date-time"}
_INT64: dict[str, Any] = {"format": "int64"}


class IncidentTarget(msgspec.Struct, rename="camel", omit_defaults=True):
    """The workload that a supervised pod belongs to."""

    kind: Annotated[
        str, msgspec.Meta(max_length=63), written("Kind of the workload, for example `Deployment`.")
    ]
    name: Annotated[_Name, written("Name of the workload.")]
    group: Annotated[
        _Name | None,
        written(
            "Multi-node group that the pod belongs to, for example the index of a group of a "
            "LeaderWorkerSet. The incident concerns the whole group, and so does a restart."
        ),
    ] = None


class LeakIncidentSpec(msgspec.Struct, rename="camel", omit_defaults=True):
    """The identity of an incident; it never changes."""

    service: Annotated[
        _Name,
        written(
            "Name of the InferenceService. For a pod of a SupervisionPolicy, name of the workload "
            "or, if unknown, of the policy."
        ),
    ]
    pod: Annotated[_Name, written("Name of the replica's pod.")]
    container: Annotated[_Name, written("Name of the container that leaked or stalled.")]
    epoch: Annotated[
        _Name, written("Engine epoch in which the incident began, written BOOT_ID:NUMBER.")
    ]
    opened_at: Annotated[str, written("Time at which the incident began.", schema=_TIME)]
    kind: Annotated[IncidentKind, written("What went wrong.")]
    policy: Annotated[
        _Name | None,
        written("Name of the SupervisionPolicy that supervises the pod, if it is one that does."),
    ] = None
    target: Annotated[
        IncidentTarget | None,
        written(
            "Workload that the pod belongs to. Absent for a pod of an InferenceService, which "
            "`service` names."
        ),
    ] = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        rule("self == oldSelf", "spec is immutable: it says which incident this is"),
    )


class IncidentTrigger(msgspec.Struct, rename="camel"):
    """A hypothesis: the growth follows a counter of the engine, or time."""

    counter: Annotated[
        _Name,
        written(
            "Engine counter that the growth follows: requests, aborts, errors, images, audios, "
            "prompt_tokens, generated_tokens, distinct_prompts, adapters, or time."
        ),
    ]
    bytes_each: Annotated[
        int,
        written(
            "Growth, in bytes, for each increment of the counter. For time, growth per hour.",
            schema=_INT64,
        ),
    ]
    confidence: Annotated[_Share, written("Confidence in the trigger, from 0 to 1.")]


class IncidentAttribution(msgspec.Struct, rename="camel", omit_defaults=True):
    """Which memory grew."""

    segment: Annotated[_Name | None, written("Memory segment that grew.")] = None
    process: Annotated[
        _Name | None,
        written(
            "Process that holds the memory: a role such as `worker`, or the name that the engine "
            "uses, such as `EngineCore`."
        ),
    ] = None
    pod: Annotated[
        _Name | None,
        written("Pod of the multi-node group that holds the memory. Absent if that is `spec.pod`."),
    ] = None
    bytes: Annotated[int | None, written("Unexplained growth, in bytes.", schema=_INT64)] = None
    bytes_per_hour: Annotated[
        int | None, written("Growth rate, in bytes per hour.", schema=_INT64)
    ] = None
    bytes_per_request: Annotated[
        int | None, written("Growth rate, in bytes per request.", schema=_INT64)
    ] = None
    trigger: Annotated[
        IncidentTrigger | None, written("What the growth seems to follow. This is a hypothesis.")
    ] = None
    confidence: Annotated[
        _Share | None,
        written("Confidence from 0 to 1. For growth, the probability that it is a leak."),
    ] = None
    evidence: Annotated[
        _Texts, written("Observations that support the attribution, one sentence each.")
    ] = []


class IncidentStep(msgspec.Struct, rename="camel", omit_defaults=True):
    """One action that was taken, or would have been."""

    time: Annotated[str, written("Time at which the step began.", schema=_TIME)]
    step: Annotated[_Name, written("Action that was taken.")]
    outcome: Annotated[_Name, written("Result of the step, as one CamelCase word.")]
    before_bytes: Annotated[
        int | None, written("Memory of the replica before the step, in bytes.", schema=_INT64)
    ] = None
    after_bytes: Annotated[
        int | None, written("Memory of the replica after the step, in bytes.", schema=_INT64)
    ] = None
    message: Annotated[_Text | None, written("Human-readable details.")] = None


class LeakIncidentStatus(msgspec.Struct, rename="camel", omit_defaults=True):
    """Progress and result of an incident."""

    phase: Annotated[IncidentPhase | None, written("Current phase of the incident.")] = None
    attribution: Annotated[IncidentAttribution | None, written("Which memory grew.")] = None
    timeline: Annotated[
        list[IncidentStep],
        msgspec.Meta(max_length=MAX_TIMELINE),
        written("Steps taken so far, oldest first."),
    ] = []
    waiting_reason: Annotated[
        _Name | None,
        written("Why a restart is waiting, or why it waited too long, as one CamelCase word."),
    ] = None
    outcome: Annotated[_Name | None, written("How the incident ended, as one CamelCase word.")] = (
        None
    )
    message: Annotated[
        _Text | None, written("Human-readable description of the current state or of the outcome.")
    ] = None
    confirmed_at: Annotated[
        str | None,
        written("Time at which the supervisor confirmed the incident.", schema=_TIME),
    ] = None
    ended_at: Annotated[str | None, written("Time at which the incident ended.", schema=_TIME)] = (
        None
    )
    returned_bytes: Annotated[
        int | None,
        written("Total memory returned by all steps, in bytes.", schema=_INT64),
    ] = None
    consumed_percent: Annotated[
        int | None, written("Share of the growth budget that is used, in percent.")
    ] = None
    diagnostics: Annotated[
        _Texts, written("Paths of saved diagnostics in the supervisor's container.")
    ] = []


class LeakIncident(msgspec.Struct):
    """A memory leak or an engine stall, and what was done about it."""

    spec: Annotated[LeakIncidentSpec, written("Identity of the incident. Immutable.")]
    status: Annotated[
        LeakIncidentStatus | None,
        written("Progress and result, written by the supervisor. Read-only."),
    ] = None
