"""Spec of SupervisionPolicy, which supervises selected pods that belong to no InferenceService.

``memory``, ``supervision`` and ``supervisor`` have the same types and meaning as in an
InferenceService.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.inferenceservice import ObjectMeta
from plimsoll_api.label_selector import SELECTOR_RULES, LabelSelector
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.names import API_VERSION, METRICS_PORT, POLICY_KIND, PROBE_PORT
from plimsoll_api.probe import InjectedProbe
from plimsoll_api.schema import FromStruct, ResourceModel
from plimsoll_api.serving import SupervisorSettings
from plimsoll_api.supervision import GATE_MESSAGE, Supervision
from plimsoll_api.supervision_policy_status import SupervisionPolicyStatus

SUPERVISOR_PORTS = (METRICS_PORT, PROBE_PORT)
ENGINE_PORT_MESSAGE = (
    f"engine.port must not be {METRICS_PORT} or {PROBE_PORT}: the supervisor uses them in each pod"
)


class SelectedEngineType(StrEnum):
    """Engine type of the selected pods; ``auto`` detects it in each pod."""

    AUTO = "auto"
    VLLM = "vllm"
    SGLANG = "sglang"
    CUSTOM = "custom"


class PolicyRollout(StrEnum):
    """Policy for selected pods that have no supervisor yet."""

    ON_DELETE = "OnDelete"
    RESTART = "Restart"


class SelectedEngine(ResourceModel):
    """Engine in a selected pod: its container, type and port."""

    type: SelectedEngineType = Field(
        default=SelectedEngineType.AUTO,
        description="Type of the engine. With `auto`, the operator detects vLLM and SGLang by "
        "the image and the command of each pod, and refuses pods with neither. Defaults to "
        "`auto`.",
    )
    container: (
        Annotated[
            str,
            StringConstraints(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
        ]
        | None
    ) = Field(
        default=None,
        description="Name of the engine's container. Defaults to the only container that runs an "
        "engine of this type, or to the only container of the pod.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="Port of the engine's HTTP server in the pod. Must not be 9464 or 9465, "
        "which the supervisor uses. Defaults to the port in the container's arguments, or else "
        "to the first port that the container declares, or else to the engine's default port.",
        json_schema_extra=make_validations(
            make_rule(f"!(self in {list(SUPERVISOR_PORTS)})", ENGINE_PORT_MESSAGE)
        ),
    )

    @field_validator("port")
    @classmethod
    def _check_port(cls, port: int | None) -> int | None:
        if port in SUPERVISOR_PORTS:
            raise ValueError(ENGINE_PORT_MESSAGE)
        return port


class SupervisionPolicySpec(ResourceModel):
    """Desired state of a SupervisionPolicy."""

    selector: LabelSelector = Field(
        description="Label selector of the pods to supervise. Must not be empty.",
        json_schema_extra=SELECTOR_RULES,
    )
    engine: SelectedEngine = Field(
        default_factory=SelectedEngine, description="Engine in the selected pods."
    )
    memory: Annotated[MemoryPolicy, FromStruct(MemoryPolicy)] = Field(
        default_factory=MemoryPolicy, description="Memory budgets of each pod."
    )
    supervision: Annotated[Supervision, FromStruct(Supervision)] = Field(
        default_factory=Supervision,
        description="How the supervisor responds to memory leaks and stalls.",
        json_schema_extra=make_validations(
            *Supervision.RULES,
            make_rule("!has(self.startGate)", GATE_MESSAGE, fieldPath=".startGate"),
        ),
    )

    @field_validator("supervision")
    @classmethod
    def _check_no_start_gate(cls, supervision: Supervision) -> Supervision:
        if supervision.start_gate is not None:
            raise ValueError(GATE_MESSAGE)
        return supervision

    probe: Annotated[InjectedProbe, FromStruct(InjectedProbe)] = Field(
        default_factory=InjectedProbe, description="Probe inside the engine."
    )
    supervisor: SupervisorSettings = Field(
        default_factory=SupervisorSettings,
        description="Settings of the supervisor's container. Its image is the operator's "
        "`--supervisor-image`.",
    )
    rollout: PolicyRollout = Field(
        default=PolicyRollout.ON_DELETE,
        description="What happens to pods that have no supervisor yet. With `OnDelete`, they get "
        "a supervisor when they are recreated. With `Restart`, the operator requests a rolling "
        "restart of each Deployment, StatefulSet and DaemonSet that owns such pods, once for "
        "each generation of the policy. Defaults to `OnDelete`.",
    )


class SupervisionPolicy(ResourceModel):
    """Supervision for inference engines in pods that other workloads create."""

    api_version: Literal["plimsoll.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["SupervisionPolicy"] = POLICY_KIND  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: SupervisionPolicySpec = Field(description="Desired state.")
    status: SupervisionPolicyStatus | None = Field(
        default=None, description="Observed state, written by the operator. Read-only."
    )
