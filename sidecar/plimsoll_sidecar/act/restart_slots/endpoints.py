"""Who serves besides this pod: the EndpointSlices of the service."""

from __future__ import annotations

import time
from typing import Protocol

from plimsoll_sidecar.clients.kube import KubeClient

POLL_S = 0.5
UNSEEN_S = 10.0
"""Probe period, endpoints and proxies, generously, where nobody can be asked."""


class Leaving(Protocol):
    """How a pod leaves the endpoints of its service."""

    def is_last_ready(self) -> bool:
        """Whether no other replica of the service is ready: a drain would end the service."""

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait until this replica is out of the Service's endpoints; False after ``timeout_s``."""


class Unseen:
    """A pod without permission to read EndpointSlices, as ``plimsoll inject`` makes it: nobody
    knows who else is ready, and leaving takes a fixed time."""

    def is_last_ready(self) -> bool:
        """Always False: without the endpoints nobody can tell, and a restart must stay possible."""
        return False

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait a fixed time, at most ``timeout_s``, for routers that cannot be seen; always
        True."""
        time.sleep(min(timeout_s, UNSEEN_S))
        return True


class Endpoints:
    """Endpoints of ``service``; raises :class:`~plimsoll_sidecar.clients.kube.KubeError`."""

    def __init__(self, kube: KubeClient, namespace: str, service: str, pod: str) -> None:
        self._kube, self._pod = kube, pod
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service}"

    def ready(self) -> dict[str, bool]:
        """Pod name -> ready. A condition that is absent means ready (the API's own rule)."""
        slices = self._kube.get(self._path, labelSelector=self._selector)
        pods: dict[str, bool] = {}
        for piece in slices.get("items") or []:
            for endpoint in piece.get("endpoints") or []:
                name = (endpoint.get("targetRef") or {}).get("name", "")
                is_ready = (endpoint.get("conditions") or {}).get("ready", True) is not False
                pods[name] = pods.get(name, False) or is_ready
        return pods

    def is_last_ready(self) -> bool:
        """True when others exist and none of them is ready: leaving now would lose the service.

        The only replica of a service may leave: nobody can take over from it, ever.
        """
        others = {name: ok for name, ok in self.ready().items() if name != self._pod}
        return bool(others) and not any(others.values())

    def wait_until_left(self, timeout_s: float) -> bool:
        """Waits until this pod is not a ready endpoint any more; False when it still is."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.ready().get(self._pod, False):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
