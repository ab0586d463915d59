"""Remove a pod from its Services' endpoints, and check whether other replicas are ready."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence

from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.workloads import make_members_service_name
from plimsoll_sidecar.act.adapters.engine_adapter import Arrivals
from plimsoll_sidecar.act.slots import LeaseSlots
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.clients.kube import EndpointSlices, KubeClient, KubeError

log = logging.getLogger(__name__)

ENDPOINTS_POLL_INTERVAL_S = 0.5
# A period of the readiness probe, and kube-proxy's update of its rules.
LEAVE_SERVICES_TIMEOUT_S = 30.0
# client-go retries a watch after up to 30 s, or 60 s with its jitter. Meanwhile, the endpoints
# controller does not notice that a pod is not ready, nor kube-proxy that the endpoints changed.
MAX_WATCH_LAG_S = 60.0
# Until the pod has left its endpoints, while outages follow each other.
MAX_LEAVE_SERVICES_S = 300.0
MAX_DEPARTURE_S = MAX_LEAVE_SERVICES_S + MAX_WATCH_LAG_S
# Longer than most updates of endpoints take.
UNKNOWN_ENDPOINTS_WAIT_S = 10.0
ARRIVALS_POLL_INTERVAL_S = 0.5
# Without a request for this long, no client reaches the pod any more.
MIN_QUIET_S, MAX_QUIET_S = 2.0, 20.0
# A longer interval has a probability of exp(-5) = 0.7 % if requests arrive independently.
QUIET_INTERVALS = 5.0


class ServiceExit:
    """Removal of a pod from its Services, without access to their EndpointSlices."""

    def is_last_ready(self, is_planned: bool = False) -> bool:
        """Report whether no other replica is ready; ``is_planned`` if this is unknown."""
        return is_planned

    def wait_until_left(self, timeout_s: float = LEAVE_SERVICES_TIMEOUT_S) -> bool:
        """Wait for a fixed time, at most ``timeout_s`` seconds, and return True."""
        time.sleep(min(timeout_s, UNKNOWN_ENDPOINTS_WAIT_S))
        return True

    def has_left(self) -> bool:
        """Report whether no Service routes to the pod; True if this is unknown."""
        return True

    def compute_watch_lag_s(self) -> float:
        """Return the seconds for which API clients may still miss changes; 0 without an outage."""
        return 0.0


# See EngineAdapter.read_arrivals.
ReadArrivals = Callable[[], Arrivals | None]


class PodServices(ServiceExit):
    """Removal of a pod from its Services, confirmed in the EndpointSlices.

    The methods raise :class:`~plimsoll_sidecar.clients.kube.KubeError`.

    Args:
        slices: The EndpointSlices of the pod's namespace.
        pod: The name of the pod.
        service: The name of the pod's Service; None to look up all Services of the pod.
        list_replicas: Returns the pods of the workload, grouped by replica.
        unused_services: Names of Services that route no requests to the pod.
        members_service: The Service that lists all pods of the policy; empty without one.
        read_expected_replicas: Returns the number of desired replicas; 0 if unknown.

    """

    def __init__(
        self,
        slices: EndpointSlices,
        pod: str,
        service: str | None = None,
        list_replicas: Callable[[], Sequence[Sequence[str]]] = tuple,
        unused_services: Collection[str] = (),
        members_service: str = "",
        read_expected_replicas: Callable[[], int] = int,
    ) -> None:
        self._slices, self._pod, self._service = slices, pod, service
        self._list_replicas, self._members_service = list_replicas, members_service
        self._read_expected_replicas = read_expected_replicas
        self._unused_services = {*unused_services, members_service}

    def read_readiness_by_service(self) -> list[dict[str, bool]]:
        """Return the readiness by pod name for each Service that routes to this pod."""
        return self._read_readiness(self._find_service_names())

    def _find_service_names(self) -> set[str]:
        if self._service is not None:
            return {self._service}
        return self._slices.find_services(self._pod) - self._unused_services

    def _read_readiness(self, service_names: set[str]) -> list[dict[str, bool]]:
        found: dict[str, dict[str, bool]] = {name: {} for name in service_names}
        for one in self._slices.iterate_endpoints(service_names):
            pods = found.setdefault(one.service, {})
            pods[one.pod] = pods.get(one.pod, False) or one.ready
        return list(found.values())

    def is_last_ready(self, is_planned: bool = False) -> bool:
        """Report whether a Service of the pod has other replicas, but none of them is ready.

        Within a Service, the pods of the workload are also checked alone, because other workloads
        may serve another model. Without a Service, only the pods of the workload are checked. If
        ``is_planned``, each Service must have another ready replica, and at least one must exist.
        """
        replicas = self._list_replicas()
        own = next((set(pods) for pods in replicas if self._pod in pods), {self._pod})
        siblings = {name for pods in replicas for name in pods}
        services = self.read_readiness_by_service() or self._read_sibling_readiness(siblings)
        # The pods of a multi-node group have no endpoints while the group is recreated.
        expected = self._read_expected_replicas()
        for pods in services:
            of_workload = {name: ok for name, ok in pods.items() if name in siblings}
            needs_others = is_planned or expected > 1
            if _has_only_unready_other_pods(pods, own, needs_others):
                return True
            if _has_only_unready_other_pods(of_workload, own):
                return True
        return is_planned and not services

    def _read_sibling_readiness(self, siblings: set[str]) -> list[dict[str, bool]]:
        if not self._members_service:
            return []
        (found,) = self._read_readiness({self._members_service})
        own = {name: ok for name, ok in found.items() if name in siblings}
        return [own] if own else []

    def has_left(self) -> bool:
        """Report whether the pod is unready in all Services, and the API clients know it."""
        return self._has_left(self._find_service_names())

    def _has_left(self, service_names: set[str]) -> bool:
        pods_by_service = self._read_readiness(service_names)
        is_ready = any(pods.get(self._pod, False) for pods in pods_by_service)
        return not is_ready and not self.compute_watch_lag_s()

    def wait_until_left(self, timeout_s: float = LEAVE_SERVICES_TIMEOUT_S) -> bool:
        """Wait until the pod is unready in all Services. Return False on timeout.

        If no Service routes to the pod, wait for a fixed time, and return True.
        """
        names = self._find_service_names()
        if not names:
            return ServiceExit().wait_until_left(timeout_s)
        deadline = time.monotonic() + timeout_s
        while not self._has_left(names):
            if time.monotonic() >= deadline:
                return False
            time.sleep(ENDPOINTS_POLL_INTERVAL_S)
        return True

    def compute_watch_lag_s(self) -> float:
        """Return the seconds for which API clients may still miss changes; 0 without an outage."""
        return max(0.0, MAX_WATCH_LAG_S - self._slices.compute_seconds_since_outage())


def wait_until_left(service_exit: ServiceExit, read_arrivals: ReadArrivals | None = None) -> None:
    """Wait until the pod has left its endpoints, and no new request arrives at its engine.

    The first wait takes at most :data:`MAX_LEAVE_SERVICES_S`. After an outage of the API server, it
    includes :data:`MAX_WATCH_LAG_S`. If the endpoints cannot be read, it takes a fixed time. The
    second wait takes at most :data:`MAX_WATCH_LAG_S`. It also covers outages that an idle
    supervisor did not notice.
    """
    _wait_for_endpoints(service_exit)
    if read_arrivals is not None and not wait_for_last_arrival(read_arrivals):
        log.warning(
            "requests still arrived %.0f s after the pod had left its endpoints; clients with open "
            "connections may send them",
            MAX_WATCH_LAG_S,
        )


def wait_for_last_arrival(read_arrivals: ReadArrivals) -> bool:
    """Wait until no new request arrives. Return False if this takes :data:`MAX_WATCH_LAG_S`.

    Return True at once if the engine does not answer or does not count its requests.
    """
    quiet_s, total = 0.0, -1
    begin = last = time.monotonic()
    while (now := time.monotonic()) < begin + MAX_WATCH_LAG_S:
        try:
            found = read_arrivals()
        except EngineError:
            return True
        if found is None:
            return True
        if total < 0:
            quiet_s, total = _compute_quiet_s(found), found.total
        elif found.total > total:
            total, last = found.total, now
        elif now >= last + quiet_s:
            return True
        time.sleep(ARRIVALS_POLL_INTERVAL_S)
    return False


def _compute_quiet_s(arrivals: Arrivals) -> float:
    if not arrivals.total:
        return MIN_QUIET_S
    quiet_s = QUIET_INTERVALS * arrivals.uptime_s / arrivals.total
    return min(max(quiet_s, MIN_QUIET_S), MAX_QUIET_S)


def _wait_for_endpoints(service_exit: ServiceExit) -> None:
    begin, left_s, message = time.monotonic(), LEAVE_SERVICES_TIMEOUT_S, ""
    deadline = begin + left_s
    while left_s > 0:
        try:
            if service_exit.wait_until_left(left_s):
                return
            message = "the pod is still in its endpoints, or may be in the rules of kube-proxy"
        except KubeError as error:
            # An API server that has just started answers 403 until it has read the roles.
            if not error.is_transient and not service_exit.compute_watch_lag_s():
                log.warning(
                    "failed to read the endpoints of the pod; waiting for a fixed time instead: %s",
                    error,
                )
                ServiceExit().wait_until_left()
                return
            message = str(error)
            time.sleep(ENDPOINTS_POLL_INTERVAL_S)
        if lag_s := service_exit.compute_watch_lag_s():
            settled_at = time.monotonic() + lag_s + LEAVE_SERVICES_TIMEOUT_S
            deadline = min(settled_at, begin + MAX_LEAVE_SERVICES_S)
        left_s = deadline - time.monotonic()
    log.warning(
        "stopped waiting after %.0f s for the pod to leave its endpoints: %s",
        time.monotonic() - begin,
        message,
    )


def find_reason_to_stay(service_exit: ServiceExit, planned: bool) -> str | None:
    """Return the reason why a drained engine must not end now; None if it may end."""
    # A kubelet that started during the drain may report the pod as ready for a moment.
    has_left = False
    with contextlib.suppress(KubeError):
        has_left = service_exit.has_left()
    if not has_left:
        wait_until_left(service_exit)
    with contextlib.suppress(KubeError):
        if service_exit.is_last_ready(planned):
            return "no other replica of the service is ready any more"
    return None


def create_pod_services(
    kube: KubeClient | None,
    service: ServiceRef,
    pod: str,
    slots: LeaseSlots | None = None,
) -> ServiceExit:
    """Return the object that removes ``pod`` from its Services.

    ``service`` is the pod's InferenceService or SupervisionPolicy. Without ``kube``, the
    EndpointSlices are not read.
    """
    if kube is None or not service.uid:
        return ServiceExit()
    slices = EndpointSlices(kube, service.namespace)
    if service.kind != POLICY_KIND:
        expected = slots.read_expected_replicas if slots else int
        return PodServices(slices, pod, service.name, read_expected_replicas=expected)
    member = service.group
    # No client uses the Service that the operator created for a RayCluster.
    unused = (member.subdomain,) if member is not None and service.is_in_ray_cluster else ()
    return PodServices(
        slices,
        pod,
        list_replicas=slots.list_replicas if slots else tuple,
        unused_services=unused,
        members_service=make_members_service_name(service.name),
    )


def _has_only_unready_other_pods(
    readiness: dict[str, bool], own_pods: set[str], needs_others: bool = False
) -> bool:
    others = [ready for name, ready in readiness.items() if name not in own_pods]
    return (needs_others or bool(others)) and not any(others)
