"""The part of an InferenceService about what is served: model, engine, containers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic.alias_generators import to_camel

from plimsoll_api.schema import (
    Model,
    PositiveDuration,
    PreservedObject,
    Quantity,
    rule,
    validations,
)
from plimsoll_api.supervision import EngineType

_CLAIM = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_PREFIX = r"[A-Za-z0-9_.=+@-][A-Za-z0-9_./=+@-]*"
URI_PATTERN = (
    rf"^(file:///|pvc://{_CLAIM}(/|$)|hf://{_REPOSITORY}$|s3://{_BUCKET}(/({_PREFIX})?)?$)"
)
URI_MESSAGE = (
    "model.uri must be file:///ABSOLUTE/PATH, pvc://CLAIM/PATH, hf://ORGANISATION/NAME or "
    "s3://BUCKET/PREFIX"
)
REVISION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_./-]*$"
PATH_PATTERN = r"^/[A-Za-z0-9_./-]*$"
RESERVED_PORTS = (8001, 9464, 9465)
PORT_MESSAGE = "8001, 9464 and 9465 belong to the admin API and the supervisor"

KEYS_MESSAGE = (
    "engine.apiKeySecretRef is for engine.type plimsoll only: give another engine its key by "
    "engine.env (VLLM_API_KEY for vllm) or engine.args"
)

Text = Annotated[str, StringConstraints(max_length=4096)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=rf"^{_CLAIM}$")]


class SecretKey(Model):
    """One key of a Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: Annotated[str, StringConstraints(max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = Field(
        default="token", description="Key within it."
    )


class SecretName(Model):
    """A Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


class ModelCache(Model):
    """Where downloaded checkpoints are kept, so that a new pod finds them."""

    claim: ObjectName = Field(
        description="A PersistentVolumeClaim of the same namespace. Several services may share it; "
        "with more than one replica it has to be ReadWriteMany."
    )


class ModelSource(Model):
    """Which weights are served and under which name."""

    uri: Annotated[
        str,
        StringConstraints(max_length=1024),
        Field(
            description="Where the checkpoint is. `file:///PATH` is a path inside the engine's "
            "container, `pvc://CLAIM/PATH` a directory on a PersistentVolumeClaim of the same "
            "namespace, mounted read-only. The others are downloaded by an init container: "
            "`hf://ORGANISATION/NAME` is a repository of the Hugging Face Hub, "
            "`s3://BUCKET/PREFIX` what is below a prefix in S3 or a store that speaks its "
            "protocol.",
            json_schema_extra=validations(
                rule(f"self.matches('{URI_PATTERN}') && !self.contains('..')", URI_MESSAGE)
            ),
        ),
    ]
    revision: Annotated[str, StringConstraints(max_length=128, pattern=REVISION_PATTERN)] | None = (
        Field(
            default=None,
            description="Branch, tag or commit of an `hf://` repository. Default: main. Name a "
            "commit to be sure that all replicas serve the same weights.",
        )
    )
    token_secret_ref: SecretKey | None = Field(
        default=None, description="Access token for an `hf://` repository that is not public."
    )
    credentials_secret_ref: SecretName | None = Field(
        default=None,
        description="Secret for an `s3://` model, whose keys are the variables of AWS's tools: "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and as needed AWS_SESSION_TOKEN, AWS_REGION "
        "and, for other stores than AWS, AWS_ENDPOINT_URL_S3. Default: a public bucket of AWS.",
    )
    cache: ModelCache | None = Field(
        default=None,
        description="Keeps what was downloaded on a claim. Default: each pod downloads for itself.",
    )
    served_name: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = Field(
        default=None,
        description="The name that clients give as `model`. Default: the InferenceService's name.",
    )

    @field_validator("uri")
    @classmethod
    def _supported(cls, uri: str) -> str:
        if not re.match(URI_PATTERN, uri) or ".." in uri:
            raise ValueError(f"{URI_MESSAGE}, not {uri!r}")
        return uri

    @model_validator(mode="after")
    def _fits_its_source(self) -> Self:
        for name, schemes in _ONLY_FOR.items():
            if getattr(self, name) is not None and not self.uri.startswith(schemes):
                raise ValueError(_only_for(name))
        return self


_ONLY_FOR = {
    "revision": ("hf://",),
    "token_secret_ref": ("hf://",),
    "credentials_secret_ref": ("s3://",),
    "cache": ("hf://", "s3://"),
}
"""Fields of a model that only go with some sources."""


def _only_for(name: str) -> str:
    return f"model.{to_camel(name)} only goes with a model.uri of {' or '.join(_ONLY_FOR[name])}"


MODEL_RULES = validations(
    *(
        rule(
            f"!has(self.{to_camel(name)}) || "
            + " || ".join(f"self.uri.startsWith('{scheme}')" for scheme in schemes),
            _only_for(name),
            fieldPath=f".{to_camel(name)}",
        )
        for name, schemes in _ONLY_FOR.items()
    )
)


class EnvVar(Model):
    """One environment variable, as in a container."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, StringConstraints(max_length=8192)] | None = Field(
        default=None, description="Its value; empty where neither this nor `valueFrom` is given."
    )
    value_from: PreservedObject | None = Field(
        default=None,
        description="Where the value comes from, as in a container: `secretKeyRef`, "
        "`configMapKeyRef`, `fieldRef` or `resourceFieldRef`. Not available in local mode.",
    )


class Resources(Model):
    """Compute resources of a container."""

    limits: Annotated[dict[str, Quantity], Field(max_length=32)] = Field(
        default_factory=dict, description="The most it may use, by resource name."
    )
    requests: Annotated[dict[str, Quantity], Field(max_length=32)] = Field(
        default_factory=dict, description="What is set aside for it, by resource name."
    )


_Path = Annotated[str, StringConstraints(max_length=256, pattern=PATH_PATTERN)]


class Probes(Model):
    """HTTP paths that the kubelet asks on the engine's port."""

    readiness: _Path | None = Field(
        default=None,
        description="Answers 200 while requests are taken. Default: /ready for `plimsoll`, /health "
        "for the others.",
    )
    liveness: _Path | None = Field(
        default=None,
        description="Answers 200 while the server lives; it must not depend on a request being "
        "done. Default: /health.",
    )


class Engine(Model):
    """The engine's container."""

    type: EngineType = Field(
        default=EngineType.PLIMSOLL,
        description="Which engine it is: the operator knows the arguments of `plimsoll`, `vllm` "
        "and `sglang`. A `custom` one starts by its image's entrypoint with `args` alone; the "
        "variables PLIMSOLL_MODEL_DIR, PLIMSOLL_MODEL_NAME and PLIMSOLL_PORT tell it what to "
        "serve where, and `args` may use them as $(NAME).",
    )
    image: Image | None = Field(
        default=None,
        description="Image of the engine. Default for `plimsoll`: the operator's `--engine-image`; "
        "the others need one.",
    )
    admin_contract: Literal["none", "plimsoll"] = Field(
        default="none",
        description="What a `custom` engine answers on 127.0.0.1:8001: `plimsoll` is the admin "
        "protocol, by which it is drained and restarted in place; with `none` it is drained by its "
        "readiness and restarted by SIGTERM.",
    )
    args: Annotated[list[Text], Field(max_length=128)] = Field(
        default_factory=list,
        description="Further arguments of the engine, after those that the operator writes.",
    )
    env: Annotated[list[EnvVar], Field(max_length=128)] = Field(
        default_factory=list,
        description="Further environment variables of the engine.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    api_key_secret_ref: SecretKey | None = Field(
        default=None,
        description="API keys of `/v1` for a `plimsoll` engine, one a line: a request needs one of "
        "them. A changed Secret is taken up without a restart. Default: `/v1` is open.",
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        default=8000,
        description="Port of the OpenAI API in the pod. Not 8001, 9464 or 9465, which the admin "
        "API and the supervisor use.",
        json_schema_extra=validations(
            rule(
                "!(self in [8001, 9464, 9465])",
                "engine.port must not be 8001, 9464 or 9465: the admin API and the supervisor "
                "use them",
            )
        ),
    )
    probes: Probes = Field(
        default_factory=Probes, description="Paths that tell the kubelet how the engine is."
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Compute resources of the engine, devices and MIG profiles included "
        "(`nvidia.com/gpu`, `nvidia.com/mig-1g.10gb`).",
    )
    startup_timeout: PositiveDuration = Field(
        default="10m", description="How long an engine may take from its start until it is ready."
    )

    @field_validator("port")
    @classmethod
    def _free_port(cls, port: int) -> int:
        if port in RESERVED_PORTS:
            raise ValueError(PORT_MESSAGE)
        return port

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if self.type is not EngineType.PLIMSOLL and self.image is None:
            raise ValueError(f"engine.image is needed for engine.type {self.type}")
        if self.admin_contract != "none" and self.type is not EngineType.CUSTOM:
            raise ValueError("engine.adminContract is for engine.type custom only")
        if self.api_key_secret_ref is not None and self.type is not EngineType.PLIMSOLL:
            raise ValueError(KEYS_MESSAGE)
        return self


ENGINE_RULES = validations(
    rule(
        # An object's own default is checked before its parts get theirs.
        "!has(self.type) || self.type == 'plimsoll' || has(self.image)",
        "engine.image is needed for every engine.type but plimsoll",
        fieldPath=".type",
    ),
    rule(
        "!has(self.adminContract) || self.adminContract == 'none' || self.type == 'custom'",
        "engine.adminContract is for engine.type custom only: the others are known",
        fieldPath=".adminContract",
    ),
    rule(
        "!has(self.apiKeySecretRef) || !has(self.type) || self.type == 'plimsoll'",
        KEYS_MESSAGE,
        fieldPath=".apiKeySecretRef",
    ),
)


class Supervisor(Model):
    """The supervisor's container."""

    image: Image | None = Field(
        default=None,
        description="Image of the supervisor. Default: the operator's `--supervisor-image`.",
    )
    resources: Resources = Field(
        default_factory=lambda: Resources(
            limits={"memory": "256Mi"}, requests={"cpu": "20m", "memory": "96Mi"}
        ),
        description="Compute resources of the supervisor.",
        json_schema_extra={
            "default": {
                "limits": {"memory": "256Mi"},
                "requests": {"cpu": "20m", "memory": "96Mi"},
            }
        },
    )
    dcgm_exporter_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="Port of the DCGM exporter on every node: device memory is read there where "
        "neither the engine nor NVML tells it. Default: it is not asked.",
    )
