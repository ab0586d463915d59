"""Who serves besides this pod: the EndpointSlices of the service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.workloads import RAY_KIND
from plimsoll_sidecar.clients.kube import KubeClient, Object

SERVICE_NAME = "kubernetes.io/service-name"
POLL_S = 0.5
LEAVE_S = 30.0
"""Longest wait for endpoints to follow an unready probe: probe period and kube-proxy's sync."""
UNSEEN_S = 10.0
"""Probe period, endpoints and proxies, generously, where nobody can be asked."""


class Leaving(Protocol):
    """How a pod leaves the endpoints of its service."""

    def is_last_ready(self) -> bool:
        """Whether no other replica of the service is ready: a drain would end the service."""

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait until this replica is out of the Service's endpoints; False after ``timeout_s``."""


class Unseen:
    """Endpoints of a pod that may not read EndpointSlices, as ``plimsoll inject`` makes it.

    Nobody knows who else is ready, and leaving takes a fixed time.
    """

    def is_last_ready(self) -> bool:
        """Return False: without endpoints nobody can tell, and a restart must stay possible."""
        return False

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait a fixed time, at most ``timeout_s``, for routers that cannot be seen."""
        time.sleep(min(timeout_s, UNSEEN_S))
        return True


class Endpoints:
    """Endpoints of ``service``; raises :class:`~plimsoll_sidecar.clients.kube.KubeError`."""

    def __init__(self, kube: KubeClient, namespace: str, service: str, pod: str) -> None:
        self._kube, self._pod = kube, pod
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_NAME}={service}"

    def ready(self) -> dict[str, bool]:
        """Pod name -> ready."""
        slices = self._kube.get(self._path, labelSelector=self._selector)
        pods: dict[str, bool] = {}
        for piece in slices.get("items") or []:
            for name, is_ready in _ready(piece):
                pods[name] = pods.get(name, False) or is_ready
        return pods

    def is_last_ready(self) -> bool:
        """Return True if others exist and none is ready: leaving now would lose the service.

        The only replica of a service may leave: nobody can ever take over from it.
        """
        return _none_ready(self.ready(), {self._pod})

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait until this pod is no longer a ready endpoint; return False if it still is."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.ready().get(self._pod, False):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)


class ServicesOfPod:
    """Endpoints of every Service that routes to the pod, whatever its name.

    A SupervisionPolicy does not know the Services in front of its pods. ``replicas`` gives the pods
    of the pod's workload, by replica, as far as they are known. ``apart`` names a Service that
    routes nobody, empty for none. Raises :class:`~plimsoll_sidecar.clients.kube.KubeError`.
    """

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        pod: str,
        replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
        apart: str = "",
    ) -> None:
        self._kube, self._pod, self._replicas, self._apart = kube, pod, replicas, apart
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def services(self) -> list[dict[str, bool]]:
        """Pod name -> ready, for each Service that routes to the pod."""
        found: dict[str, dict[str, bool]] = {}
        for piece in self._kube.get(self._path).get("items") or []:
            labels = piece["metadata"].get("labels") or {}
            of_service = found.setdefault(labels.get(SERVICE_NAME, ""), {})
            for name, is_ready in _ready(piece):
                of_service[name] = of_service.get(name, False) or is_ready
        ignored = ("", self._apart)
        return [pods for name, pods in found.items() if name not in ignored and self._pod in pods]

    def is_last_ready(self) -> bool:
        """Return True if a Service, or the pod's workload in it, has others and none is ready.

        The workload counts by itself because another one may serve another model. The pods of one
        replica leave together: they do not stand in for one another.
        """
        replicas = self._replicas()
        own = next((set(pods) for pods in replicas if self._pod in pods), {self._pod})
        siblings = {name for pods in replicas for name in pods}
        for pods in self.services():
            of_workload = {name: ok for name, ok in pods.items() if name in siblings}
            if _none_ready(pods, own) or _none_ready(of_workload, own):
                return True
        return False

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait until no Service has this pod as a ready endpoint; False if one still has.

        If no Service routes to the pod, its clients have its address from elsewhere: wait a fixed
        time.
        """
        if not self.services():
            return Unseen().wait_until_left(timeout_s)
        deadline = time.monotonic() + timeout_s
        while any(pods[self._pod] for pods in self.services()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True


def endpoints_of_pod(
    kube: KubeClient | None,
    service: ServiceRef,
    pod: str,
    replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
) -> Leaving:
    """Return how ``pod`` leaves the Services that route to it.

    ``service`` is what it belongs to, and ``replicas`` gives the pods of its workload, by replica.
    """
    if kube is None or not service.uid:
        return Unseen()
    if service.kind != POLICY_KIND:
        return Endpoints(kube, service.namespace, service.name, pod)
    member, workload = service.group, service.workload
    # The Service that the operator made for a RayCluster has no clients.
    of_ray = workload is not None and workload.kind == RAY_KIND
    apart = member.subdomain if member is not None and of_ray else ""
    return ServicesOfPod(kube, service.namespace, pod, replicas, apart)


def _none_ready(pods: dict[str, bool], own: set[str]) -> bool:
    """Whether there are others than ``own`` and none of them is ready."""
    others = [ok for name, ok in pods.items() if name not in own]
    return bool(others) and not any(others)


def _ready(piece: Object) -> Iterator[tuple[str, bool]]:
    """Yield the pod name and readiness of each endpoint in an EndpointSlice.

    A condition that is absent means ready (the API's own rule). A Service with
    ``publishNotReadyAddresses`` calls every pod ready: the pod's own readiness is the condition
    ``serving``.
    """
    for endpoint in piece.get("endpoints") or []:
        name = (endpoint.get("targetRef") or {}).get("name", "")
        conditions = endpoint.get("conditions") or {}
        yield name, all(conditions.get(one) is not False for one in ("ready", "serving"))
