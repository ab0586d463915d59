"""Serving part of an InferenceService: model, engine, containers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic.alias_generators import to_camel

from plimsoll_api import engines
from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.engines import EngineType
from plimsoll_api.names import ADMIN_PORT, METRICS_PORT, PROBE_PORT
from plimsoll_api.resources import RESOURCE_RULES, EngineResources, Resources
from plimsoll_api.schema import ATOMIC_CONFIG, PositiveDuration, PreservedObject, ResourceModel

_CLAIM_NAME_PATTERN = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_REPOSITORY_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*"
_BUCKET_PATTERN = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_PREFIX_PATTERN = r"[A-Za-z0-9_.=+@-][A-Za-z0-9_./=+@-]*"
URI_PATTERN = rf"^(file:///|pvc://{_CLAIM_NAME_PATTERN}(/|$)|hf://{_REPOSITORY_PATTERN}$|s3://{_BUCKET_PATTERN}(/({_PREFIX_PATTERN})?)?$)"
URI_MESSAGE = (
    "model.uri must be file:///ABSOLUTE/PATH, pvc://CLAIM/PATH, hf://ORGANISATION/NAME or "
    "s3://BUCKET/PREFIX"
)
REVISION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_./-]*$"
PATH_PATTERN = r"^/[A-Za-z0-9_./-]*$"
RESERVED_PORTS = (ADMIN_PORT, METRICS_PORT, PROBE_PORT)
PORT_MESSAGE = (
    f"engine.port must not be {ADMIN_PORT}, {METRICS_PORT} or {PROBE_PORT}: the admin API and the "
    "supervisor use them"
)

API_KEYS_MESSAGE = (
    "engine.apiKeySecretRef is only supported for engine.type plimsoll: for another engine, set"
    " the key in engine.args or in engine.env (VLLM_API_KEY for vllm)"
)

Text = Annotated[str, StringConstraints(max_length=4096)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=rf"^{_CLAIM_NAME_PATTERN}$")]


class SecretKey(ResourceModel):
    """Key of a Secret in the same namespace."""

    model_config = ATOMIC_CONFIG

    name: ObjectName = Field(description="Name of the Secret.")
    key: Annotated[str, StringConstraints(max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = Field(
        default="token", description="Key within the Secret. Defaults to `token`."
    )


class SecretName(ResourceModel):
    """Secret in the same namespace."""

    model_config = ATOMIC_CONFIG

    name: ObjectName = Field(description="Name of the Secret.")


class EnvVar(ResourceModel):
    """Environment variable of a container."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, StringConstraints(max_length=8192)] | None = Field(
        default=None,
        description="Value of the variable. If neither `value` nor `valueFrom` is set, the "
        "variable is empty.",
    )
    value_from: PreservedObject | None = Field(
        default=None,
        description="Source of the value, as in a container: `secretKeyRef`, "
        "`configMapKeyRef`, `fieldRef` or `resourceFieldRef`. Not available in local mode.",
    )


class ModelCache(ResourceModel):
    """Storage for downloaded checkpoints, which new pods reuse."""

    claim_name: ObjectName = Field(
        description="Name of a PersistentVolumeClaim in the same namespace. Several services can "
        "share it. With more than one replica, it must be ReadWriteMany. With one replica, a "
        "claim that only one node or pod can mount interrupts the service during each rollout."
    )


class ModelSource(ResourceModel):
    """Weights to serve, and the name of the model."""

    uri: Annotated[
        str,
        StringConstraints(max_length=1024),
        Field(
            description="Location of the checkpoint. `file:///PATH` is a path inside "
            "the engine's container. `pvc://CLAIM/PATH` is a directory on a "
            "PersistentVolumeClaim in the same namespace, which is mounted read-only. For "
            "`hf://ORGANISATION/NAME`, a repository on the Hugging Face Hub, and "
            "`s3://BUCKET/PREFIX`, a prefix in S3 or a compatible store, an init container "
            "downloads the checkpoint.",
            json_schema_extra=make_validations(
                make_rule(f"self.matches('{URI_PATTERN}') && !self.contains('..')", URI_MESSAGE)
            ),
        ),
    ]
    revision: Annotated[str, StringConstraints(max_length=128, pattern=REVISION_PATTERN)] | None = (
        Field(
            default=None,
            description="Branch, tag or commit of an `hf://` repository. Set a commit "
            "to make sure that all replicas serve the same weights. Defaults to main.",
        )
    )
    token_secret_ref: SecretKey | None = Field(
        default=None,
        description="Access token for an `hf://` repository. Not needed for public repositories.",
    )
    credentials_secret_ref: SecretName | None = Field(
        default=None,
        description="Secret with the credentials for an `s3://` model. Its keys are the "
        "environment variables of the AWS tools: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "and optionally AWS_SESSION_TOKEN and AWS_REGION. For a store other than AWS, also set "
        "AWS_ENDPOINT_URL_S3. If unset, the pod's own identity (AWS web identity, EKS Pod "
        "Identity) is used. A pod without an identity can read only public buckets.",
    )
    cache: ModelCache | None = Field(
        default=None,
        description="Volume that keeps downloaded checkpoints. If unset, each pod "
        "downloads the checkpoint itself.",
    )
    env: Annotated[list[EnvVar], Field(max_length=64)] | None = Field(
        default=None,
        description="Additional environment variables for the download. They take precedence "
        "over the variables that the download takes from `engine.env`: HTTP_PROXY, HTTPS_PROXY, "
        "ALL_PROXY, NO_PROXY, SSL_CERT_FILE, SSL_CERT_DIR, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE, "
        "AWS_CA_BUNDLE, HF_ENDPOINT, HF_TOKEN, HF_HUB_DOWNLOAD_TIMEOUT, HF_HUB_ETAG_TIMEOUT, "
        "HF_HUB_DISABLE_XET and HF_XET_*. If `credentialsSecretRef` is unset, the download also "
        "takes AWS_*.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    resources: Resources | None = Field(
        default=None,
        description="Compute resources of the download. Defaults to the operator's "
        "`--download-resources`: requests of 100m of CPU and 256Mi of memory, and a memory limit "
        "of 2Gi. The default also includes a limit or request for each resource that has one in "
        "the engine's container.",
        json_schema_extra=RESOURCE_RULES,
    )
    served_name: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = Field(
        default=None,
        description="Model name that clients send as `model`. Defaults to the name "
        "of the InferenceService.",
    )

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, uri: str) -> str:
        if not re.match(URI_PATTERN, uri) or ".." in uri:
            raise ValueError(f"{URI_MESSAGE}, not {uri!r}")
        return uri

    @model_validator(mode="after")
    def _check_fields_of_source(self) -> Self:
        for name, schemes in _SCHEMES_BY_FIELD.items():
            if getattr(self, name) is not None and not self.uri.startswith(schemes):
                raise ValueError(_format_schemes_message(name))
        return self


_SCHEMES_BY_FIELD = {
    "revision": ("hf://",),
    "token_secret_ref": ("hf://",),
    "credentials_secret_ref": ("s3://",),
    "cache": ("hf://", "s3://"),
    "env": ("hf://", "s3://"),
    "resources": ("hf://", "s3://"),
}
"""Optional fields of a model, each with the URI schemes that support it."""


def _format_schemes_message(name: str) -> str:
    schemes = " or ".join(_SCHEMES_BY_FIELD[name])
    return f"model.{to_camel(name)} requires a model.uri that begins with {schemes}"


MODEL_RULES = make_validations(
    *(
        make_rule(
            f"!has(self.{to_camel(name)}) || "
            + " || ".join(f"self.uri.startsWith('{scheme}')" for scheme in schemes),
            _format_schemes_message(name),
            fieldPath=f".{to_camel(name)}",
        )
        for name, schemes in _SCHEMES_BY_FIELD.items()
    )
)


_Path = Annotated[str, StringConstraints(max_length=256, pattern=PATH_PATTERN)]


class EngineProbes(ResourceModel):
    """HTTP paths on the engine's port for the kubelet's probes."""

    readiness: _Path | None = Field(
        default=None,
        description="Path of the startup and readiness probes. Must return 200 "
        "while the engine accepts requests. Defaults to /ready for `plimsoll` and to "
        "/health for other engines.",
    )
    liveness: _Path | None = Field(
        default=None,
        description="Path of the liveness probe. Must return 200 while the server "
        "is alive, even if no request completes. Defaults to /health.",
    )


class Engine(ResourceModel):
    """Container of the engine."""

    type: EngineType = Field(
        default=EngineType.PLIMSOLL,
        description="Type of the engine. For `plimsoll`, `vllm` and `sglang`, the "
        "operator sets the command and its arguments. A `custom` engine runs the entrypoint "
        "of its image with `args` alone. It reads the model's directory, the model's name "
        "and the port from PLIMSOLL_MODEL_DIR, PLIMSOLL_MODEL_NAME and PLIMSOLL_PORT, which "
        "you can also use in `args` as $(NAME). Defaults to `plimsoll`.",
    )
    image: Image | None = Field(
        default=None,
        description="Container image of the engine. Required unless `type` is "
        "`plimsoll`, which defaults to the image in the operator's `--engine-image`.",
    )
    admin_contract: Literal["None", "Plimsoll"] = Field(
        default="None",
        description="Protocol that a `custom` engine serves on 127.0.0.1:8001. With "
        "`Plimsoll`, the admin protocol, the supervisor can drain the engine and restart it "
        "in place. With `None`, the supervisor drains the engine by marking the pod not "
        "ready, and restarts it with SIGTERM. Defaults to `None`.",
    )
    args: Annotated[list[Text], Field(max_length=128)] = Field(
        default_factory=list,
        description="Additional arguments for the engine. They follow the arguments that the "
        "operator sets, and must not set the same flags.",
    )
    env: Annotated[list[EnvVar], Field(max_length=128)] = Field(
        default_factory=list,
        description="Additional environment variables for the engine.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    api_key_secret_ref: SecretKey | None = Field(
        default=None,
        description="API keys for `/v1`, one per line. Each request must present "
        "one of them. Only for `plimsoll` engines. Changes to the Secret take effect "
        "without a restart. If unset, `/v1` requires no key.",
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        default=8000,
        description="Port of the OpenAI API in the pod. Must not be 8001, 9464 or "
        "9465, which the admin API and the supervisor use. Defaults to 8000.",
        json_schema_extra=make_validations(
            make_rule(
                f"!(self in {list(RESERVED_PORTS)})",
                PORT_MESSAGE,
            )
        ),
    )
    probes: EngineProbes = Field(
        default_factory=EngineProbes,
        description="HTTP paths that the kubelet probes on the engine's port.",
    )
    resources: EngineResources = Field(
        default_factory=EngineResources,
        description="Compute resources of the engine, including devices and MIG "
        "profiles (`nvidia.com/gpu`, `nvidia.com/mig-1g.10gb`).",
        json_schema_extra=RESOURCE_RULES,
    )
    startup_timeout: PositiveDuration = Field(
        default="10m",
        description="Maximum time that the engine may take to become ready after it "
        "starts. Defaults to 10m.",
    )

    @property
    def url_scheme(self) -> Literal["http", "https"]:
        """Scheme of the URLs that the engine serves: HTTPS if its arguments name a certificate."""
        return engines.find_url_scheme(self.type, self.args)

    # The API server has stored the value of an earlier release as the default.
    @field_validator("admin_contract", mode="before")
    @classmethod
    def _convert_stored_contract(cls, contract: object) -> object:
        return {"none": "None", "plimsoll": "Plimsoll"}.get(str(contract), contract)

    @field_validator("port")
    @classmethod
    def _check_port(cls, port: int) -> int:
        if port in RESERVED_PORTS:
            raise ValueError(PORT_MESSAGE)
        return port

    @model_validator(mode="after")
    def _check_fields_of_type(self) -> Self:
        if self.type is not EngineType.PLIMSOLL and self.image is None:
            raise ValueError(f"engine.image is required for engine.type {self.type}")
        if self.admin_contract != "None" and self.type is not EngineType.CUSTOM:
            raise ValueError("engine.adminContract is only supported for engine.type custom")
        if self.api_key_secret_ref is not None and self.type is not EngineType.PLIMSOLL:
            raise ValueError(API_KEYS_MESSAGE)
        keys = self.api_key_secret_ref is not None
        if (refused := engines.explain_refused_args(self.type, self.args, keys)) is not None:
            raise ValueError(refused)
        return self


ENGINE_RULES = make_validations(
    make_rule(
        # CEL checks an object's default before the defaults of its fields are set.
        "!has(self.type) || self.type == 'plimsoll' || has(self.image)",
        "engine.image is required unless engine.type is plimsoll",
        fieldPath=".type",
    ),
    make_rule(
        # An earlier release wrote 'none' into each object, but new ones must not have it.
        "!has(self.adminContract) || self.adminContract in ['None', 'none'] || "
        "self.type == 'custom'",
        "engine.adminContract is only supported for engine.type custom",
        fieldPath=".adminContract",
    ),
    make_rule(
        "!has(self.apiKeySecretRef) || !has(self.type) || self.type == 'plimsoll'",
        API_KEYS_MESSAGE,
        fieldPath=".apiKeySecretRef",
    ),
    *engines.FLAG_RULES,
)


SUPERVISOR_RESOURCES = Resources(
    limits={"memory": "256Mi"}, requests={"cpu": "20m", "memory": "96Mi"}
)
"""Default resources of a supervisor; a measured supervisor used 34 MiB and 2 % of a CPU."""


DOWNLOAD_RESOURCES = Resources(
    limits={"memory": "2Gi"}, requests={"cpu": "100m", "memory": "256Mi"}
)
"""Default resources of a model download, whose buffers take a quarter of the memory limit."""


class SupervisorSettings(ResourceModel):
    """Settings of the supervisor, for InferenceServices and SupervisionPolicies."""

    resources: Resources | None = Field(
        default=None,
        description="Compute resources of the supervisor. Defaults to the operator's "
        "`--supervisor-resources`: requests of 20m of CPU and 96Mi of memory, and a memory limit "
        "of 256Mi. If all other containers of the pod have a limit or request for a resource, the "
        "default also has one, so that the pod keeps its QoS class. In a pod of the QoS class "
        "Guaranteed, the requests equal the limits.",
        json_schema_extra=RESOURCE_RULES,
    )
    image_pull_secrets: Annotated[list[SecretName], Field(max_length=16)] = Field(
        default_factory=list,
        description="Secrets in the same namespace with credentials for the registry of the "
        "supervisor's image. They are added to those of the pod.",
    )
    dcgm_exporter_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="Port of the DCGM exporter on every node. The supervisor reads "
        "device memory from the exporter if neither the engine nor NVML reports it. If "
        "unset, the supervisor does not query the exporter.",
    )
    amd_exporter_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="Port of AMD's device-metrics-exporter on every node. The "
        "supervisor reads the device memory of AMD GPUs from it. If unset, the supervisor "
        "does not query the exporter.",
    )

    # An earlier release stored the default in each object.
    @field_validator("resources")
    @classmethod
    def _drop_stored_default(cls, resources: Resources | None) -> Resources | None:
        return None if resources == SUPERVISOR_RESOURCES else resources


class SupervisorContainer(SupervisorSettings):
    """The supervisor's container in a pod of an InferenceService."""

    image: Image | None = Field(
        default=None,
        description="Container image of the supervisor. Defaults to the image in "
        "the operator's `--supervisor-image`.",
    )
