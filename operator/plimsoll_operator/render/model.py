"""Where a replica's weights come from: a claim, or a download before the engine starts."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.serving import ModelSource
from plimsoll_operator.render import paths
from plimsoll_operator.render.containers import LAST_WORDS, Images, restricted

VOLUME = "model"
DOWNLOAD = "model-download"


def mounts(service: InferenceService) -> list[dict[str, Any]]:
    """How the engine sees the checkpoint: read-only. Nothing for a path in its own image."""
    if service.spec.model.uri.startswith("file://"):
        return []
    return [{"name": VOLUME, "mountPath": paths.CLAIM_DIR, "readOnly": True}]


def volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return the volume that holds the checkpoint, if there is one."""
    model = service.spec.model
    if model.uri.startswith("file://"):
        return []
    if model.uri.startswith("pvc://"):
        source = {"claimName": paths.claim(model.uri)[0], "readOnly": True}
        return [{"name": VOLUME, "persistentVolumeClaim": source}]
    if model.cache is not None:
        return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": model.cache.claim_name}}]
    return [{"name": VOLUME, "emptyDir": {}}]


def download(service: InferenceService, images: Images) -> list[dict[str, Any]]:
    """Return the init container that downloads, in our own engine's image whatever engine follows.

    It goes on where an earlier one was cut off, and is done at once if everything is there.
    """
    model = service.spec.model
    if not model.uri.startswith(("hf://", "s3://")):
        return []
    return [
        {
            "name": DOWNLOAD,
            "image": images.engine,
            "command": [
                *("python", "-m", "plimsoll_engine.download"),
                *_source(model),
                f"--to={paths.model_dir(model)}",
            ],
            **_credentials(model),
            # Files are written as they arrive; hashes of chunks are all that it keeps.
            "resources": {
                "requests": {"cpu": "100m", "memory": "256Mi"},
                "limits": {"memory": "2Gi"},
            },
            **LAST_WORDS,
            "securityContext": restricted(),
            "volumeMounts": [
                {"name": VOLUME, "mountPath": paths.CLAIM_DIR},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }
    ]


def _source(model: ModelSource) -> list[str]:
    if model.uri.startswith("s3://"):
        return [f"--s3={model.uri}"]
    return [
        f"--repository={model.uri.removeprefix('hf://')}",
        f"--revision={model.revision or paths.DEFAULT_REVISION}",
    ]


def _credentials(model: ModelSource) -> dict[str, Any]:
    """Environment of the download, which alone sees the Secret."""
    variables: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},
        {"name": "HF_HOME", "value": "/tmp/huggingface"},
    ]
    if token := model.token_secret_ref:
        source = {"secretKeyRef": {"name": token.name, "key": token.key}}
        variables.append({"name": "HF_TOKEN", "valueFrom": source})
    keys = model.credentials_secret_ref
    every = {"envFrom": [{"secretRef": {"name": keys.name}}]} if keys else {}
    return {"env": variables, **every}
