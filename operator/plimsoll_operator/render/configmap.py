"""The supervisor's configuration, mounted as a directory: changes arrive without a restart."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.supervision import CONFIG_FILE, encode
from plimsoll_operator.render import names
from plimsoll_operator.render.supervisor import supervisor_config


def config_map(service: InferenceService) -> dict[str, Any]:
    """The ConfigMap that holds ``supervisor.json``."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.supervisor(service.metadata.name)},
        "data": {CONFIG_FILE: encode(supervisor_config(service)).decode()},
    }
