"""LeakIncident: a leak or stall, and the actions taken, written by the replica's supervisor.

Times are in RFC 3339, sizes in bytes. Any client with the token of a supervised pod may write
LeakIncidents, so the schema and ``config/admission-policy.yaml`` limit names, texts, lists, the
object's size and the number of writes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from plimsoll_api.cel import Rule, make_rule
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.manifest import describe_field
from plimsoll_api.roles import PodRole

MAX_INCIDENTS_PER_POD = 20
"""Maximum number of incidents per pod, whose names end with different numbers below this value."""
MAX_STATUS_WRITES = 100
"""Maximum number of times that a supervisor writes the status of an incident."""
MAX_INCIDENT_TEXT_CHARS = 400
MAX_TEXTS_PER_LIST = 12
MAX_STATUS_STEPS = 24
MAX_TOTAL_TEXT_CHARS = 4096

_Name = Annotated[str, msgspec.Meta(max_length=253)]
_Word = Annotated[str, msgspec.Meta(max_length=63)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_INCIDENT_TEXT_CHARS)]
_TextList = Annotated[list[_Text], msgspec.Meta(max_length=MAX_TEXTS_PER_LIST)]
_Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
_WriteCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_STATUS_WRITES)]
_TIME: dict[str, Any] = {"format": "date-time", "maxLength": 64}
_INT64: dict[str, Any] = {"format": "int64"}
ATOMIC_MAP: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}
_LIST_MAP: dict[str, Any] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
MAX_INCIDENT_CONDITIONS = 4


class IncidentWorkload(msgspec.Struct, rename="camel", omit_defaults=True):
    """Workload of the pod."""

    kind: Annotated[
        _Word, describe_field("Kind of the object, for example `InferenceService` or `Deployment`.")
    ]
    name: Annotated[_Name, describe_field("Name of the object.")]
    api_group: Annotated[
        _Name, describe_field("API group of the object. Empty or absent for the core group.")
    ] = ""


class PolicyReference(msgspec.Struct, rename="camel"):
    """A SupervisionPolicy in the same namespace."""

    name: Annotated[_Name, describe_field("Name of the SupervisionPolicy.")]


class IncidentTarget(msgspec.Struct, rename="camel"):
    """Role of the pod in disaggregated or multi-node serving."""

    role: Annotated[
        PodRole,
        describe_field(
            "Role of the pod in disaggregated or multi-node serving, from the labels of its "
            "controller or the arguments of its engine."
        ),
    ]


class LeakIncidentSpec(msgspec.Struct, rename="camel", omit_defaults=True):
    """Identity of an incident, which never changes."""

    id: Annotated[
        _Name,
        describe_field(
            "Name of the incident in the supervisor's journal, page and log. Unlike the object's "
            "name, it is never used again."
        ),
    ]
    workload_ref: Annotated[
        IncidentWorkload,
        describe_field(
            "InferenceService of the pod, or the workload that owns the pod. For a pod without a "
            "workload, the pod itself.",
            schema=ATOMIC_MAP,
        ),
    ]
    pod: Annotated[_Name, describe_field("Name of the replica's pod.")]
    container: Annotated[_Name, describe_field("Name of the container that leaked or stalled.")]
    epoch: Annotated[
        _Name,
        describe_field("Engine epoch in which the incident began, in the form BOOT_ID:NUMBER."),
    ]
    opened_at: Annotated[str, describe_field("Time at which the incident began.", schema=_TIME)]
    kind: Annotated[IncidentKind, describe_field("Kind of the problem, or of the planned action.")]
    policy_ref: Annotated[
        PolicyReference | None,
        describe_field(
            "SupervisionPolicy that supervises the pod. Absent for a pod of an InferenceService.",
            schema=ATOMIC_MAP,
        ),
    ] = None
    pod_group: Annotated[
        _Name | None,
        describe_field(
            "Multi-node group that the pod belongs to, for example the key of a group of a "
            "LeaderWorkerSet. The incident and its restarts concern the whole group."
        ),
    ] = None
    target: Annotated[
        IncidentTarget | None,
        describe_field(
            "Role of the pod. Absent if the pod serves whole requests by itself.",
            schema=ATOMIC_MAP,
        ),
    ] = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        make_rule("self == oldSelf", "spec is immutable: it identifies the incident"),
    )


class IncidentTrigger(msgspec.Struct, rename="camel"):
    """Hypothesis that the growth follows a counter of the engine, or time."""

    counter: Annotated[
        _Name,
        describe_field(
            "Engine counter that the growth follows: requests, aborts, errors, images, audios, "
            "prompt_tokens, generated_tokens, distinct_prompts, adapters, or time."
        ),
    ]
    bytes_each: Annotated[
        int,
        describe_field(
            "Growth in bytes for each increment of the counter. For `time`, growth per hour.",
            schema=_INT64,
        ),
    ]
    confidence_percent: Annotated[
        _Percent, describe_field("Confidence in the trigger, in percent.")
    ]


class IncidentAttribution(msgspec.Struct, rename="camel", omit_defaults=True):
    """Memory that grew."""

    segment: Annotated[_Name | None, describe_field("Memory segment that grew.")] = None
    process: Annotated[
        _Name | None,
        describe_field(
            "Process that holds the memory: a role such as `worker`, or the name that the engine "
            "uses, such as `EngineCore`."
        ),
    ] = None
    pod: Annotated[
        _Name | None,
        describe_field(
            "Pod of the multi-node group that holds the memory. Absent if `spec.pod` holds it."
        ),
    ] = None
    bytes: Annotated[int | None, describe_field("Unexplained growth, in bytes.", schema=_INT64)] = (
        None
    )
    bytes_per_hour: Annotated[
        int | None, describe_field("Growth rate, in bytes per hour.", schema=_INT64)
    ] = None
    bytes_per_request: Annotated[
        int | None, describe_field("Growth rate, in bytes per request.", schema=_INT64)
    ] = None
    trigger: Annotated[
        IncidentTrigger | None,
        describe_field("Counter that the growth seems to follow. This is a hypothesis."),
    ] = None
    confidence_percent: Annotated[
        _Percent | None,
        describe_field("Confidence, in percent. For growth, the probability that it is a leak."),
    ] = None
    evidence: Annotated[
        _TextList, describe_field("Observations that support the attribution, one sentence each.")
    ] = []


class IncidentCondition(msgspec.Struct, rename="camel", omit_defaults=True):
    """Condition, as in the Kubernetes API conventions."""

    type: Annotated[_Word, describe_field("Type of the condition, in CamelCase.")]
    status: Annotated[
        Literal["True", "False", "Unknown"],
        describe_field("Status of the condition: True, False or Unknown."),
    ]
    reason: Annotated[_Word, describe_field("Reason for the status, as one CamelCase word.")]
    last_transition_time: Annotated[
        str, describe_field("Time at which `status` last changed.", schema=_TIME)
    ]
    message: Annotated[_Text, describe_field("Human-readable details.")] = ""
    observed_generation: Annotated[
        int | None,
        describe_field("Generation of the spec for which the condition was set.", schema=_INT64),
    ] = None


# If ``field`` is set, each item is an object that contains its text in this field.
def _make_length_expression(texts: str, field: str = "") -> str:
    one = f"has(x.{field}) ? size(x.{field}) : 0" if field else "size(x)"
    return f"(has({texts}) ? {texts}.map(x, {one}).sum() : 0)"


class IncidentStep(msgspec.Struct, rename="camel", omit_defaults=True):
    """Action that was taken, or that would have been taken in mode Observe."""

    time: Annotated[str, describe_field("Time at which the step began.", schema=_TIME)]
    step: Annotated[_Word, describe_field("Action that was taken.")]
    outcome: Annotated[_Word, describe_field("Result of the step, as one CamelCase word.")]
    before_bytes: Annotated[
        int | None,
        describe_field("Memory of the replica before the step, in bytes.", schema=_INT64),
    ] = None
    after_bytes: Annotated[
        int | None, describe_field("Memory of the replica after the step, in bytes.", schema=_INT64)
    ] = None
    message: Annotated[_Text | None, describe_field("Human-readable details.")] = None


class LeakIncidentStatus(msgspec.Struct, rename="camel", omit_defaults=True):
    """Progress and result of an incident."""

    observed_generation: Annotated[
        int | None,
        describe_field("Generation of the spec that this status describes.", schema=_INT64),
    ] = None
    conditions: Annotated[
        list[IncidentCondition],
        msgspec.Meta(max_length=MAX_INCIDENT_CONDITIONS),
        describe_field(
            "Conditions of the incident. `Resolved` is True if the problem is gone. "
            "`Reconciling` is True while the incident is open, so that kstatus reports "
            "InProgress.",
            schema=_LIST_MAP,
        ),
    ] = []
    revision: Annotated[
        _WriteCount | None,
        describe_field(
            "Number of times that the supervisor has written this status. Each write must increase "
            f"it, up to {MAX_STATUS_WRITES}. The last write is for the end of the incident."
        ),
    ] = None
    phase: Annotated[IncidentPhase | None, describe_field("Current phase of the incident.")] = None
    attribution: Annotated[
        IncidentAttribution | None, describe_field("Memory that grew, and the evidence for it.")
    ] = None
    timeline: Annotated[
        list[IncidentStep],
        msgspec.Meta(max_length=MAX_STATUS_STEPS),
        describe_field("Newest steps, oldest first."),
    ] = []
    waiting_reason: Annotated[
        _Word | None,
        describe_field(
            "Reason why a restart is waiting, or why it waited too long, as one CamelCase word."
        ),
    ] = None
    outcome: Annotated[
        _Word | None, describe_field("Outcome of the incident, as one CamelCase word.")
    ] = None
    message: Annotated[
        _Text | None,
        describe_field("Human-readable description of the current state or of the outcome."),
    ] = None
    confirmed_at: Annotated[
        str | None,
        describe_field("Time at which the supervisor confirmed the incident.", schema=_TIME),
    ] = None
    ended_at: Annotated[
        str | None, describe_field("Time at which the incident ended.", schema=_TIME)
    ] = None
    returned_bytes: Annotated[
        int | None,
        describe_field("Total memory returned by all steps, in bytes.", schema=_INT64),
    ] = None
    consumed_percent: Annotated[
        int | None, describe_field("Share of the growth budget that is used, in percent.")
    ] = None
    diagnostics: Annotated[
        _TextList, describe_field("Paths of saved diagnostics in the supervisor's container.")
    ] = []

    RULES: ClassVar[tuple[Rule, ...]] = (
        make_rule(
            " + ".join(
                (
                    "(has(self.message) ? size(self.message) : 0)",
                    _make_length_expression("self.timeline", "message"),
                    _make_length_expression("self.conditions", "message"),
                    _make_length_expression("self.diagnostics"),
                    "(has(self.attribution) ? "
                    f"{_make_length_expression('self.attribution.evidence')} : 0)",
                )
            )
            + f" <= {MAX_TOTAL_TEXT_CHARS}",
            f"all texts of a status together must have at most {MAX_TOTAL_TEXT_CHARS} characters",
        ),
    )


class LeakIncident(msgspec.Struct):
    """Memory leak or engine stall, and the actions taken."""

    spec: Annotated[LeakIncidentSpec, describe_field("Identity of the incident. Immutable.")]
    status: Annotated[
        LeakIncidentStatus | None,
        describe_field("Progress and result, written by the supervisor. Read-only."),
    ] = None
