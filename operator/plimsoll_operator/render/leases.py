"""Restart slots: as many Leases as replicas may restart at once.

They are applied without ``spec``, which belongs to the supervisors that take and release them.
"""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.render import names


def slot_leases(service: InferenceService) -> list[dict[str, Any]]:
    """One Lease for each slot."""
    count = service.spec.supervision.max_unavailable
    return [
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name},
        }
        for name in names.slots(service.metadata.name, count)
    ]
