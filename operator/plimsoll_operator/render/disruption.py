"""How many replicas may be away at once: restart slots, and the budget for evictions."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.operation import count
from plimsoll_operator.render import names


def disruption_budget(service: InferenceService) -> list[dict[str, Any]]:
    """Return at most one PodDisruptionBudget: evictions take no more replicas than restarts.

    Replicas that are not ready may always be evicted: a budget must not keep a node from being
    drained for the sake of pods that serve nobody.
    """
    wanted = service.spec.disruption
    if not wanted.enabled:
        return []
    own = wanted.max_unavailable
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": service.metadata.name},
            "spec": {
                "maxUnavailable": service.spec.supervision.max_unavailable
                if own is None
                else count(own),
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": names.selector(service.metadata.name)},
            },
        }
    ]


def slot_leases(service: InferenceService) -> list[dict[str, Any]]:
    """Return one Lease for each restart slot.

    They are applied without ``spec``, which belongs to the supervisors that take and release them.
    """
    count = service.spec.supervision.max_unavailable
    return [
        {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
        for name in names.slots(service.metadata.name, count)
    ]
