"""The part of an InferenceService about what is served: model, engine, containers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

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
URI_PATTERN = rf"^(file:///|pvc://{_CLAIM}(/|$)|hf://{_REPOSITORY}$)"
URI_MESSAGE = "model.uri must be file:///ABSOLUTE/PATH, pvc://CLAIM/PATH or hf://ORGANISATION/NAME"
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
            "namespace, mounted read-only, `hf://ORGANISATION/NAME` a repository of the Hugging "
            "Face Hub that an init container downloads before the engine starts.",
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
        scheme, _, rest = uri.partition("://")
        known = {
            "file": rest.startswith("/"),
            "pvc": bool(rest.partition("/")[0]),
            "hf": rest.count("/") == 1 and all(rest.split("/")),
        }
        if not known.get(scheme) or ".." in uri:
            raise ValueError(f"{URI_MESSAGE}, not {uri!r}")
        return uri

    @model_validator(mode="after")
    def _only_downloads(self) -> Self:
        given = {
            "revision": self.revision,
            "tokenSecretRef": self.token_secret_ref,
            "cache": self.cache,
        }
        unused = [name for name, value in given.items() if value is not None]
        if unused and not self.uri.startswith("hf://"):
            raise ValueError(f"{', '.join(unused)} only goes with a model.uri that begins hf://")
        return self


MODEL_RULES = validations(
    rule(
        "self.uri.startsWith('hf://') || "
        "!(has(self.revision) || has(self.tokenSecretRef) || has(self.cache))",
        "model.revision, model.tokenSecretRef and model.cache only go with a model.uri that "
        "begins hf://",
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
