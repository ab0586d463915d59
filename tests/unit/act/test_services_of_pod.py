"""Which Services say whether a pod may leave.

Tests ``act/restart_slots/endpoints.py``.
"""

from __future__ import annotations

from typing import Any

from plimsoll_sidecar.act.restart_slots.endpoints import SERVICE_NAME, ServicesOfPod
from plimsoll_sidecar.clients.kube import KubeClient

HEAD = "llm-head"


class Slices(KubeClient):
    """The EndpointSlices of a namespace."""

    def __init__(self, **services: dict[str, bool]) -> None:
        self._services = services

    def get(self, path: str, **query: str) -> dict[str, Any]:
        return {"items": [_slice(name, pods) for name, pods in self._services.items()]}


def _slice(service: str, pods: dict[str, bool]) -> dict[str, Any]:
    return {
        "metadata": {"labels": {SERVICE_NAME: service}},
        "endpoints": [
            {"targetRef": {"name": name}, "conditions": {"ready": True, "serving": serving}}
            for name, serving in pods.items()
        ],
    }


def test_a_service_without_clients_says_nothing_of_who_is_left() -> None:
    kube = Slices(front={HEAD: True}, group={HEAD: True, "stranger": False})
    assert ServicesOfPod(kube, "ns", HEAD).is_last_ready()
    apart = ServicesOfPod(kube, "ns", HEAD, apart="group")
    assert apart.services() == [{HEAD: True}]
    assert not apart.is_last_ready()
