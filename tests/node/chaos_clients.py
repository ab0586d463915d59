"""Clients of Services while the node's and the cluster's own processes are killed.

They judge each request that fails: could a replica have served it that was ready all the time?
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import httpx

from plimsoll_api.names import METRICS_PORT
from tests.lab.chaos import Watching
from tests.lab.chaos_record import History
from tests.lab.kube import Kube

SERVICE = "kubernetes.io/service-name"
PROXY_S = 2.0
"""Within this time kube-proxy knows of a replica that has become ready, or no longer is."""
STATE_S = 2.0
Request = Callable[[str], object]


def is_out_of_service(address: str) -> bool:
    """Whether the supervisor of the pod says that it keeps the pod unready."""
    try:
        state = httpx.get(f"http://{address}:{METRICS_PORT}/state", timeout=STATE_S).json()
    except (httpx.HTTPError, ValueError):
        return False
    return bool(state.get("out_of_service"))


class Endpoints(Watching):
    """The replicas of each Service that are ready, as the API server said at last.

    A kubelet that starts reports each running pod as ready until it has a worker for its probe
    (kubernetes#135795), also a pod that its supervisor keeps out of service.
    """

    def __init__(self, kube: Kube, history: History) -> None:
        label = SERVICE.replace(".", "\\.")
        # In a watch, kubectl's {range} works for the first object only.
        fields = ("targetRef.name", "addresses[0]", "conditions.ready")
        columns = "|".join(
            (f"{{.metadata.labels.{label}}}", *(f"{{.endpoints[*].{one}}}" for one in fields))
        )
        super().__init__(kube, "endpointslices", SERVICE, columns)
        self._history, self._lock = history, threading.Lock()
        self._since: dict[str, dict[str, float]] = {}
        self._misreported: dict[tuple[str, str], float] = {}
        """Until when, in the future as long as the API server says so."""

    def see(self, line: str) -> None:
        """Take over the endpoints of one slice. A Service of the lab has one."""
        service, *fields = line.strip().split("|")
        found = zip(*(one.split() for one in fields), strict=True)
        ready = {address: pod for pod, address, is_ready in found if is_ready == "true"}
        now = time.monotonic()
        with self._lock:
            before = self._since.get(service, {})
            self._since[service] = {address: before.get(address, now) for address in ready}
            for address in before.keys() - ready.keys():
                if (service, address) in self._misreported:
                    self._misreported[service, address] = now
        for address in ready.keys() - before.keys():
            if is_out_of_service(address):
                self._history.note("reported as ready", f"{ready[address]} at {now:.1f}")
                with self._lock:
                    self._misreported[service, address] = math.inf
        self._history.note(f"ready in {service}", sorted(ready.values()))

    def addresses(self, service: str, begin: float) -> list[str]:
        """Of the replicas to which kube-proxy has forwarded from ``begin`` until now."""
        with self._lock:
            found = self._since.get(service, {})
            return [address for address, since in found.items() if begin - since >= PROXY_S]

    def misreported(self, service: str, begin: float) -> list[str]:
        """Of the replicas out of service to which kube-proxy may have forwarded since ``begin``."""
        with self._lock:
            found = self._misreported.items()
            return [one for (of, one), until in found if of == service and until + PROXY_S >= begin]


class Clients:
    """Sends requests through Services. ``lost`` are those that failed though a replica was ready
    all the time and serves; ``unserved`` are the other ones that failed. ``misdirected`` are lost
    ones after a kubelet has reported another replica as ready that was out of service, and that
    does not serve.

    A kubelet that starts says that none of its pods is ready, until it has probed each.
    """

    def __init__(self, kube: Kube, endpoints: Endpoints, port: int, history: History) -> None:
        self._kube, self._endpoints, self._port, self._history = kube, endpoints, port, history
        self._urls: dict[str, str] = {}
        self.lost: list[str] = []
        self.unserved: list[str] = []
        self.misdirected: list[str] = []

    def ask(self, service: str, request: Request) -> None:
        """Send ``request`` to the Service, on a connection of its own. Raises what it raises."""
        url, begin = self._url(service), time.monotonic()
        try:
            request(url)
        except (httpx.HTTPError, ValueError) as error:
            ready = self._endpoints.addresses(service, begin)
            able = [address for address in ready if self._serves(address, request)]
            took = f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}"
            others = self._endpoints.misreported(service, begin)
            ended = [address for address in others if not self._serves(address, request)]
            text = f"{service}: {took}; ready and serving all the time: {able}"
            text += f"; reported as ready, but out of service: {ended}" if ended else ""
            kept = self.unserved if not able else self.misdirected if ended else self.lost
            kept.append(text)
            count = len(self.lost) + len(self.misdirected) + len(self.unserved)
            self._history.note("failed", f"{count}, {text}")  # a line for each
            raise

    def _url(self, service: str) -> str:
        if service not in self._urls:
            found = self._kube.get("service", service) or {}
            self._urls[service] = f"http://{found['spec']['clusterIP']}"
        return self._urls[service]

    def _serves(self, address: str, request: Request) -> bool:
        try:
            request(f"http://{address}:{self._port}")
        except (httpx.HTTPError, ValueError):
            return False
        return True
