"""Where a replica's weights come from: a claim, or a download before the engine starts."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.render import paths
from plimsoll_operator.render.containers import Images, restricted

VOLUME = "model"
DOWNLOAD = "model-download"


def mounts(service: InferenceService) -> list[dict[str, Any]]:
    """How the engine sees the checkpoint: read-only. Nothing for a path in its own image."""
    if service.spec.model.uri.startswith("file://"):
        return []
    return [{"name": VOLUME, "mountPath": paths.CLAIM_DIR, "readOnly": True}]


def volumes(service: InferenceService) -> list[dict[str, Any]]:
    """The volume that holds the checkpoint."""
    model = service.spec.model
    if model.uri.startswith("file://"):
        return []
    if model.uri.startswith("pvc://"):
        source = {"claimName": paths.claim(model.uri)[0], "readOnly": True}
        return [{"name": VOLUME, "persistentVolumeClaim": source}]
    if model.cache is not None:
        return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": model.cache.claim}}]
    return [{"name": VOLUME, "emptyDir": {}}]


def download(service: InferenceService, images: Images) -> list[dict[str, Any]]:
    """The init container that downloads, in our own engine's image whatever engine follows.

    It goes on where an earlier one was cut off, and is done at once where all is there.
    """
    model = service.spec.model
    if not model.uri.startswith("hf://"):
        return []
    token = model.token_secret_ref
    variables: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},
        {"name": "HF_HOME", "value": "/tmp/huggingface"},
    ]
    if token is not None:
        source = {"secretKeyRef": {"name": token.name, "key": token.key}}
        variables.append({"name": "HF_TOKEN", "valueFrom": source})
    return [
        {
            "name": DOWNLOAD,
            "image": images.engine,
            "command": [
                *("python", "-m", "plimsoll_engine.download"),
                f"--repository={model.uri.removeprefix('hf://')}",
                f"--revision={model.revision or paths.DEFAULT_REVISION}",
                f"--to={paths.model_dir(model)}",
            ],
            "env": variables,
            # Files are written as they arrive; hashes of chunks are all that it keeps.
            "resources": {
                "requests": {"cpu": "100m", "memory": "256Mi"},
                "limits": {"memory": "2Gi"},
            },
            "securityContext": restricted(),
            "volumeMounts": [
                {"name": VOLUME, "mountPath": paths.CLAIM_DIR},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }
    ]
