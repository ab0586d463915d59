"""Remove a pod from its Services' endpoints, and find out whether other replicas are ready."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.workloads import RAY_KIND, make_members_service_name
from plimsoll_sidecar.clients.kube import EndpointSlices, KubeClient, KubeError

log = logging.getLogger(__name__)

ENDPOINTS_POLL_S = 0.5
LEAVE_TIMEOUT_S = 30.0
"""Seconds within which endpoints follow an unready pod: the probe's period plus kube-proxy's sync.
"""
UNKNOWN_ENDPOINTS_WAIT_S = 10.0
"""Seconds to wait if the endpoints are unknown. Endpoints are usually updated in less."""


class ServiceExit:
    """Removal of a pod from its Services if their EndpointSlices cannot be read.

    It is then unknown which other replicas are ready, and the removal takes a fixed time.
    """

    def is_last_ready(self, planned: bool = False) -> bool:
        """Report whether no other replica is ready, so that a drain would stop the service.

        If this is unknown, return ``planned``: a planned restart can wait, but another one must
        remain possible.
        """
        return planned

    def wait_until_left(self, timeout_s: float = LEAVE_TIMEOUT_S) -> bool:
        """Wait until no Service routes to this pod; return False after ``timeout_s``."""
        time.sleep(min(timeout_s, UNKNOWN_ENDPOINTS_WAIT_S))
        return True


class PodServices(ServiceExit):
    """Removal of a pod from the Services that route to it, as its EndpointSlices show.

    ``service`` is the name of the pod's Service, or None for a pod of a SupervisionPolicy, whose
    Services are looked up. ``replicas`` returns the pods of the workload, grouped by replica.
    ``unused`` names Services that route no requests. ``members`` names the one of them that lists
    all pods of the policy; empty if there is none. The methods raise
    :class:`~plimsoll_sidecar.clients.kube.KubeError`.
    """

    def __init__(
        self,
        slices: EndpointSlices,
        pod: str,
        service: str | None = None,
        replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
        unused: Collection[str] = (),
        members: str = "",
    ) -> None:
        self._slices, self._pod, self._service = slices, pod, service
        self._replicas, self._members = replicas, members
        self._unused = {*unused, members}

    def read_readiness_by_service(self) -> list[dict[str, bool]]:
        """Return the readiness of each pod by name, for each Service that routes to this pod."""
        return self._read_readiness(self._find_service_names())

    def _find_service_names(self) -> set[str]:
        if self._service is not None:
            return {self._service}
        return self._slices.find_services(self._pod) - self._unused

    def _read_readiness(self, names: set[str]) -> list[dict[str, bool]]:
        found: dict[str, dict[str, bool]] = {name: {} for name in names}
        for one in self._slices.iterate_endpoints(names):
            pods = found.setdefault(one.service, {})
            pods[one.pod] = pods.get(one.pod, False) or one.ready
        return list(found.values())

    def is_last_ready(self, planned: bool = False) -> bool:
        """Report whether other replicas exist and none is ready, in any Service of the pod.

        The pod's workload within a Service is also checked on its own, because other workloads may
        serve another model. Without a Service, for example in an InferencePool, the workload is
        checked alone. The pods of one replica restart together, so they do not replace each
        other. The only replica of a service may restart, because no other could ever take over. A
        ``planned`` restart needs a Service, and another ready replica in each.
        """
        replicas = self._replicas()
        own = next((set(pods) for pods in replicas if self._pod in pods), {self._pod})
        siblings = {name for pods in replicas for name in pods}
        services = self.read_readiness_by_service() or self._read_members(siblings)
        for pods in services:
            of_workload = {name: ok for name, ok in pods.items() if name in siblings}
            if _lacks_other_ready_pod(pods, own, planned) or _lacks_other_ready_pod(
                of_workload, own
            ):
                return True
        return planned and not services

    def _read_members(self, siblings: set[str]) -> list[dict[str, bool]]:
        """Return the readiness of ``siblings`` in the policy's own Service, as a list of one item.

        The list is empty if it is unknown.
        """
        if not self._members:
            return []
        (found,) = self._read_readiness({self._members})
        own = {name: ok for name, ok in found.items() if name in siblings}
        return [own] if own else []

    def wait_until_left(self, timeout_s: float = LEAVE_TIMEOUT_S) -> bool:
        """Wait until the pod is not ready in any Service; return False on timeout.

        If no Service routes to the pod, clients have its address from elsewhere: wait a fixed time.
        """
        names = self._find_service_names()
        if not names:
            return ServiceExit().wait_until_left(timeout_s)
        deadline = time.monotonic() + timeout_s
        while any(pods.get(self._pod, False) for pods in self._read_readiness(names)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(ENDPOINTS_POLL_S)
        return True


def wait_until_left(found: ServiceExit) -> None:
    """Wait until the pod has left its endpoints, or a fixed time if its endpoints are unknown.

    While the API server does not answer, its endpoints do not change and clients still reach the
    pod. The server is therefore asked again for :data:`LEAVE_TIMEOUT_S`.
    """
    left_s, message = LEAVE_TIMEOUT_S, ""
    deadline = time.monotonic() + left_s
    while left_s > 0:
        try:
            found.wait_until_left(left_s)
            return
        except KubeError as error:
            if not error.is_transient:
                log.warning("cannot read the pod's endpoints, waiting a fixed time: %s", error)
                ServiceExit().wait_until_left()
                return
            message = str(error)
            time.sleep(ENDPOINTS_POLL_S)
            left_s = deadline - time.monotonic()
    log.warning("cannot read the pod's endpoints within %.0f s: %s", LEAVE_TIMEOUT_S, message)


def create_pod_services(
    kube: KubeClient | None,
    service: ServiceRef,
    pod: str,
    replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
) -> ServiceExit:
    """Return the object that removes ``pod`` from the Services that route to it.

    ``service`` is the pod's service or policy. ``replicas`` returns the pods of the workload,
    grouped by replica.
    """
    if kube is None or not service.uid:
        return ServiceExit()
    slices = EndpointSlices(kube, service.namespace)
    if service.kind != POLICY_KIND:
        return PodServices(slices, pod, service.name)
    member, workload = service.group, service.workload
    # No client uses the Service that the operator created for a RayCluster.
    of_ray = workload is not None and workload.kind == RAY_KIND
    unused = (member.subdomain,) if member is not None and of_ray else ()
    members = make_members_service_name(service.name)
    return PodServices(slices, pod, replicas=replicas, unused=unused, members=members)


def _lacks_other_ready_pod(pods: dict[str, bool], own: set[str], planned: bool = False) -> bool:
    """Report whether there are pods other than ``own`` and none of them is ready.

    If ``planned``, also return True if there are no other pods.
    """
    others = [ok for name, ok in pods.items() if name not in own]
    return (planned or bool(others)) and not any(others)
