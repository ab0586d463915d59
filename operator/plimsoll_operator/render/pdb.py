"""The PodDisruptionBudget: evictions take no more replicas at once than restarts may."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.render import names


def disruption_budget(service: InferenceService) -> dict[str, Any]:
    """At most ``supervision.maxUnavailable`` replicas out by evictions."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": service.metadata.name},
        "spec": {
            "maxUnavailable": service.spec.supervision.max_unavailable,
            "selector": {"matchLabels": names.selector(service.metadata.name)},
        },
    }
