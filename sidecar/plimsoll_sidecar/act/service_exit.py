"""Who serves besides this pod: the EndpointSlices of the service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.workloads import RAY_KIND
from plimsoll_sidecar.clients.kube import EndpointSlices, KubeClient, KubeError

log = logging.getLogger(__name__)

POLL_S = 0.5
LEAVE_S = 30.0
"""Longest wait for endpoints to follow an unready probe: probe period and kube-proxy's sync."""
UNSEEN_S = 10.0
"""Generous time for probe period, endpoints and proxies if the endpoints are unknown."""


class ServiceExit:
    """How a pod leaves the endpoints of its Services where they cannot be read.

    Nobody knows who else is ready, and leaving takes a fixed time.
    """

    def is_last_ready(self) -> bool:
        """Whether no other replica of the service is ready: a drain would end the service.

        False where nobody can tell: a restart must stay possible.
        """
        return False

    def wait_until_left(self, timeout_s: float = LEAVE_S) -> bool:
        """Wait until this replica is out of the Services' endpoints; False after ``timeout_s``."""
        time.sleep(min(timeout_s, UNSEEN_S))
        return True


class ServicesOfPod(ServiceExit):
    """Endpoints of the Services that route to the pod.

    ``service`` names that Service. It is None for a pod of a SupervisionPolicy, which does not know
    the Services in front of its pods: they are looked up. ``replicas`` gives the known pods of the
    pod's workload, by replica. ``apart`` names a Service that routes no requests, empty for none.
    Raises :class:`~plimsoll_sidecar.clients.kube.KubeError`.
    """

    def __init__(
        self,
        slices: EndpointSlices,
        pod: str,
        service: str | None = None,
        replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
        apart: str = "",
    ) -> None:
        self._slices, self._pod, self._service = slices, pod, service
        self._replicas, self._apart = replicas, apart

    def services(self) -> list[dict[str, bool]]:
        """Pod name -> ready, for each Service that routes to the pod."""
        return self._ready(self._names())

    def _names(self) -> set[str]:
        if self._service is not None:
            return {self._service}
        return self._slices.services_of(self._pod) - {self._apart}

    def _ready(self, names: set[str]) -> list[dict[str, bool]]:
        found: dict[str, dict[str, bool]] = {name: {} for name in names}
        for one in self._slices.of(names):
            pods = found.setdefault(one.service, {})
            pods[one.pod] = pods.get(one.pod, False) or one.ready
        return list(found.values())

    def is_last_ready(self) -> bool:
        """Return True if a Service, or the pod's workload in it, has others and none is ready.

        The workload is judged by itself because another one may serve another model. The pods of
        one replica leave together: they do not stand in for one another. The only replica of a
        service may leave, because no other can ever take over from it.
        """
        replicas = self._replicas()
        own = next((set(pods) for pods in replicas if self._pod in pods), {self._pod})
        siblings = {name for pods in replicas for name in pods}
        for pods in self.services():
            of_workload = {name: ok for name, ok in pods.items() if name in siblings}
            if _none_ready(pods, own) or _none_ready(of_workload, own):
                return True
        return False

    def wait_until_left(self, timeout_s: float = LEAVE_S) -> bool:
        """Wait until no Service has this pod as a ready endpoint; False if one still has.

        If no Service routes to the pod, its clients have its address from elsewhere: wait a fixed
        time.
        """
        names = self._names()
        if not names:
            return ServiceExit().wait_until_left(timeout_s)
        deadline = time.monotonic() + timeout_s
        while any(pods.get(self._pod, False) for pods in self._ready(names)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True


def wait_until_left(found: ServiceExit) -> None:
    """Wait until the pod has left its endpoints; for a fixed time if they are unknown."""
    try:
        found.wait_until_left()
    except KubeError as error:
        log.warning("the pod's endpoints are unknown: %s", error)
        ServiceExit().wait_until_left()


def endpoints_of_pod(
    kube: KubeClient | None,
    service: ServiceRef,
    pod: str,
    replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
) -> ServiceExit:
    """Return how ``pod`` leaves the Services that route to it.

    ``service`` is what it belongs to, and ``replicas`` gives the pods of its workload, by replica.
    """
    if kube is None or not service.uid:
        return ServiceExit()
    slices = EndpointSlices(kube, service.namespace)
    if service.kind != POLICY_KIND:
        return ServicesOfPod(slices, pod, service.name)
    member, workload = service.group, service.workload
    # The Service that the operator made for a RayCluster has no clients.
    of_ray = workload is not None and workload.kind == RAY_KIND
    apart = member.subdomain if member is not None and of_ray else ""
    return ServicesOfPod(slices, pod, replicas=replicas, apart=apart)


def _none_ready(pods: dict[str, bool], own: set[str]) -> bool:
    """Whether there are others than ``own`` and none of them is ready."""
    others = [ok for name, ok in pods.items() if name not in own]
    return bool(others) and not any(others)
