"""API keys of the engine's ``/v1``: one key of a Secret, mounted as a file.

It is mounted as a directory, so that a rotated key arrives without a restart (the engine reads the
file again when it changes). A pod whose Secret is missing waits, and its events name the Secret.
"""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.render.paths import KEYS_DIR, KEYS_FILE

VOLUME = "api-keys"


def volumes(service: InferenceService) -> list[dict[str, Any]]:
    """At most one volume, with one file."""
    ref = service.spec.engine.api_key_secret_ref
    if ref is None:
        return []
    item = {"key": ref.key, "path": KEYS_FILE}
    return [{"name": VOLUME, "secret": {"secretName": ref.name, "items": [item]}}]


def mounts(service: InferenceService) -> list[dict[str, Any]]:
    """Return the mount of the keys, which only the engine's container gets."""
    if service.spec.engine.api_key_secret_ref is None:
        return []
    return [{"name": VOLUME, "mountPath": KEYS_DIR, "readOnly": True}]
