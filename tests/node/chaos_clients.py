"""Clients of Services while the node's and the cluster's own processes are killed.

They judge each request that fails: could a replica have served it that was ready all the time?
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx

from tests.lab.chaos import Watching
from tests.lab.chaos_record import History
from tests.lab.kube import Kube

SERVICE = "kubernetes.io/service-name"
PROXY_S = 2.0
"""Within this time kube-proxy knows of a replica that has become ready."""
Request = Callable[[str], object]


class Endpoints(Watching):
    """The replicas of each Service that are ready, as the API server said at last."""

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

    def see(self, line: str) -> None:
        """Take over the endpoints of one slice. A Service of the lab has one."""
        service, *fields = line.strip().split("|")
        found = zip(*(one.split() for one in fields), strict=True)
        ready = {address: pod for pod, address, is_ready in found if is_ready == "true"}
        now = time.monotonic()
        with self._lock:
            before = self._since.get(service, {})
            self._since[service] = {address: before.get(address, now) for address in ready}
        self._history.note(f"ready in {service}", sorted(ready.values()))

    def addresses(self, service: str, begin: float) -> list[str]:
        """Of the replicas to which kube-proxy has forwarded from ``begin`` until now."""
        with self._lock:
            found = self._since.get(service, {})
            return [address for address, since in found.items() if begin - since >= PROXY_S]


class Clients:
    """Sends requests through Services. ``lost`` are those that failed though a replica was ready
    all the time and serves; ``unserved`` are the other ones that failed.

    A kubelet that starts says that none of its pods is ready, until it has probed each.
    """

    def __init__(self, kube: Kube, endpoints: Endpoints, port: int, history: History) -> None:
        self._kube, self._endpoints, self._port, self._history = kube, endpoints, port, history
        self._urls: dict[str, str] = {}
        self.lost: list[str] = []
        self.unserved: list[str] = []

    def ask(self, service: str, request: Request) -> None:
        """Send ``request`` to the Service, on a connection of its own. Raises what it raises."""
        url, begin = self._url(service), time.monotonic()
        try:
            request(url)
        except (httpx.HTTPError, ValueError) as error:
            ready = self._endpoints.addresses(service, begin)
            able = [address for address in ready if self._serves(address, request)]
            took = f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}"
            text = f"{service}: {took}; ready and serving all the time: {able}"
            (self.lost if able else self.unserved).append(text)
            count = len(self.lost) + len(self.unserved)
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
