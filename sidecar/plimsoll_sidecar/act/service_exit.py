"""Removes a pod from the endpoints of its Services, and finds out if other replicas are ready."""

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
LEAVE_TIMEOUT_S = 30.0
"""Seconds within which endpoints follow an unready pod: the probe period and kube-proxy's sync."""
UNKNOWN_LEAVE_S = 10.0
"""Seconds to wait if the endpoints are unknown; longer than they usually need."""


class ServiceExit:
    """Exit from the Services of a pod whose EndpointSlices cannot be read.

    It is then unknown which other replicas are ready, and leaving takes a fixed time.
    """

    def is_last_ready(self, planned: bool = False) -> bool:
        """Report whether no other replica is ready, so that a drain would stop the service.

        If it is unknown, False, because a restart must remain possible; for a ``planned`` restart,
        which can wait, True.
        """
        return planned

    def wait_until_left(self, timeout_s: float = LEAVE_TIMEOUT_S) -> bool:
        """Wait until this pod is in no endpoints; return False after ``timeout_s``."""
        time.sleep(min(timeout_s, UNKNOWN_LEAVE_S))
        return True


class PodServices(ServiceExit):
    """The Services that route to a pod, read from EndpointSlices.

    ``service`` is the name of its Service. It is None for a pod of a SupervisionPolicy; then its
    Services are looked up. ``replicas`` returns the pods of its workload, grouped by replica.
    ``unused`` is the name of a Service that routes no requests, empty for none. The methods raise
    :class:`~plimsoll_sidecar.clients.kube.KubeError`.
    """

    def __init__(
        self,
        slices: EndpointSlices,
        pod: str,
        service: str | None = None,
        replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
        unused: str = "",
    ) -> None:
        self._slices, self._pod, self._service = slices, pod, service
        self._replicas, self._apart = replicas, unused

    def readiness_by_service(self) -> list[dict[str, bool]]:
        """Return the readiness of each pod by name, for each Service that routes to this pod."""
        return self._read_readiness(self._service_names())

    def _service_names(self) -> set[str]:
        if self._service is not None:
            return {self._service}
        return self._slices.services_of(self._pod) - {self._apart}

    def _read_readiness(self, names: set[str]) -> list[dict[str, bool]]:
        found: dict[str, dict[str, bool]] = {name: {} for name in names}
        for one in self._slices.endpoints_of(names):
            pods = found.setdefault(one.service, {})
            pods[one.pod] = pods.get(one.pod, False) or one.ready
        return list(found.values())

    def is_last_ready(self, planned: bool = False) -> bool:
        """Report whether other replicas exist and none is ready, in any Service of the pod.

        The pod's workload within a Service is also checked on its own, because other workloads may
        serve another model. The pods of one replica restart together, so they do not replace each
        other. The only replica of a service may restart, because no other could ever take over. A
        ``planned`` restart needs a Service, and another ready replica in each.
        """
        replicas = self._replicas()
        own = next((set(pods) for pods in replicas if self._pod in pods), {self._pod})
        siblings = {name for pods in replicas for name in pods}
        services = self.readiness_by_service()
        for pods in services:
            of_workload = {name: ok for name, ok in pods.items() if name in siblings}
            if _no_other_ready(pods, own, planned) or _no_other_ready(of_workload, own):
                return True
        return planned and not services

    def wait_until_left(self, timeout_s: float = LEAVE_TIMEOUT_S) -> bool:
        """Wait until the pod is not ready in any Service; return False on timeout.

        If no Service routes to the pod, its clients know its address from elsewhere, so wait a
        fixed time.
        """
        names = self._service_names()
        if not names:
            return ServiceExit().wait_until_left(timeout_s)
        deadline = time.monotonic() + timeout_s
        while any(pods.get(self._pod, False) for pods in self._read_readiness(names)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True


def wait_until_left(found: ServiceExit) -> None:
    """Wait until the pod has left its endpoints, or a fixed time if they are unknown."""
    try:
        found.wait_until_left()
    except KubeError as error:
        log.warning("cannot read the endpoints of the pod: %s", error)
        ServiceExit().wait_until_left()


def endpoints_of_pod(
    kube: KubeClient | None,
    service: ServiceRef,
    pod: str,
    replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
) -> ServiceExit:
    """Return how ``pod`` leaves the Services that route to it.

    ``service`` is its service or policy. ``replicas`` returns the pods of its workload, grouped by
    replica.
    """
    if kube is None or not service.uid:
        return ServiceExit()
    slices = EndpointSlices(kube, service.namespace)
    if service.kind != POLICY_KIND:
        return PodServices(slices, pod, service.name)
    member, workload = service.group, service.workload
    # The Service that the operator created for a RayCluster has no clients.
    of_ray = workload is not None and workload.kind == RAY_KIND
    unused = member.subdomain if member is not None and of_ray else ""
    return PodServices(slices, pod, replicas=replicas, unused=unused)


def _no_other_ready(pods: dict[str, bool], own: set[str], planned: bool = False) -> bool:
    """Report whether there are pods other than ``own`` and none of them is ready.

    If ``planned``, there need not be any.
    """
    others = [ok for name, ok in pods.items() if name not in own]
    return (planned or bool(others)) and not any(others)
