"""Render the volume with a replica's model, and the download of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.serving import EnvVar, ModelSource
from plimsoll_operator.render import paths
from plimsoll_operator.render.containers import (
    LOG_ON_ERROR,
    Images,
    fit_resources,
    make_resources,
    make_restricted_context,
)

MODEL_VOLUME = "model"
DOWNLOAD_CONTAINER = "model-download"


def make_model_mounts(service: InferenceService) -> list[dict[str, Any]]:
    """Return the engine's read-only mount of the checkpoint; empty if the image contains it."""
    if service.spec.model.uri.startswith("file://"):
        return []
    return [{"name": MODEL_VOLUME, "mountPath": paths.CLAIM_DIR, "readOnly": True}]


def make_model_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return the volume with the checkpoint; empty if the engine's image contains it."""
    model = service.spec.model
    if model.uri.startswith("file://"):
        return []
    if model.uri.startswith("pvc://"):
        source = {"claimName": paths.parse_claim_uri(model.uri)[0], "readOnly": True}
        return [{"name": MODEL_VOLUME, "persistentVolumeClaim": source}]
    if model.cache is not None:
        return [
            {"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": model.cache.claim_name}}
        ]
    return [{"name": MODEL_VOLUME, "emptyDir": {}}]


def make_download_containers(service: InferenceService, images: Images) -> list[dict[str, Any]]:
    """Return the init container that downloads the model; empty if no download is needed."""
    model = service.spec.model
    if not model.uri.startswith(("hf://", "s3://")):
        return []
    return [
        {
            "name": DOWNLOAD_CONTAINER,
            "image": images.supervisor,
            "command": [
                *("python", "-m", "plimsoll_engine.download"),
                *_make_source_args(model),
                f"--to={paths.get_model_dir(model)}",
            ],
            **_make_environment(service),
            "resources": make_resources(model.resources)
            if model.resources is not None
            else fit_resources(
                images.download, [{"resources": make_resources(service.spec.engine.resources)}]
            ),
            **LOG_ON_ERROR,
            "securityContext": make_restricted_context(),
            "volumeMounts": [
                {"name": MODEL_VOLUME, "mountPath": paths.CLAIM_DIR},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }
    ]


def _make_source_args(model: ModelSource) -> list[str]:
    if model.uri.startswith("s3://"):
        return [f"--s3={model.uri}"]
    return [
        f"--repository={model.uri.removeprefix('hf://')}",
        f"--revision={model.revision or paths.DEFAULT_REVISION}",
    ]


DOWNLOAD_VARIABLES = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("AWS_CA_BUNDLE", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_DOWNLOAD_TIMEOUT"),
        *("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET"),
    }
)
"""Environment variables of the engine that the download also gets, in upper case. A download
needs the hub, so HF_HUB_OFFLINE is excluded."""


# ``has_secret`` is True if a Secret contains the credentials for S3.
def _is_download_variable(name: str, has_secret: bool) -> bool:
    aws = name.startswith("AWS_") and not has_secret
    return name.upper() in DOWNLOAD_VARIABLES or name.startswith("HF_XET_") or aws


def _make_variables(variables: Iterable[EnvVar]) -> list[dict[str, Any]]:
    return [one.model_dump(by_alias=True, exclude_none=True) for one in variables]


# Only the download gets the model's Secrets. If a variable is set twice, the last value is used.
def _make_environment(service: InferenceService) -> dict[str, Any]:
    source = service.spec.model
    keys = source.credentials_secret_ref
    variables: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},
        {"name": "HF_HOME", "value": "/tmp/huggingface"},
        *_make_variables(
            one
            for one in service.spec.engine.env
            if _is_download_variable(one.name, keys is not None)
        ),
    ]
    if token := source.token_secret_ref:
        reference = {"secretKeyRef": {"name": token.name, "key": token.key}}
        variables.append({"name": "HF_TOKEN", "valueFrom": reference})
    variables += _make_variables(source.env or ())
    every = {"envFrom": [{"secretRef": {"name": keys.name}}]} if keys else {}
    return {"env": list({one["name"]: one for one in variables}.values()), **every}
