"""Scrape memory metrics from the supervisors.

Pods are untrusted: a scrape follows no redirects, sends no credentials and requests no compression.
If a page is too large or too slow, the pod's values are unknown. Each namespace has its own limit,
so slow pods do not delay other namespaces.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable

import aiohttp

from plimsoll_api.inferenceservice_status import ConditionType
from plimsoll_api.names import METRICS_PORT
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.fleet.supervisor_metrics import (
    SupervisorMetrics,
    count_drained,
    find_pods_missing_signals,
    list_drained_pods,
    list_pods_near_limit,
    make_memory_status,
    parse_metrics_page,
)
from plimsoll_operator.kinds import Key, Object
from plimsoll_operator.render.names import SUPERVISOR
from plimsoll_operator.render.paths import HOST_PORTS
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.status.conditions import make_slow_leak_condition

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 3.0
MAX_CONCURRENT_SCRAPES = 64
MAX_CONCURRENT_PER_NAMESPACE = 8
MAX_PAGE_BYTES = 1 << 18
"""Maximum size of a page; a supervisor's page has about 30 KiB."""

READ_CHUNK_BYTES = 1 << 14
HEADERS = {"Accept": "text/plain", "Accept-Encoding": "identity"}


PORT_PATTERN = re.compile(r":\d+$")
"""Pattern for the port at the end of an address; IPv6 addresses are in brackets."""


class BadPageError(Exception):
    """Raised for a response that is not a metrics page; the message says why."""


class Scraper:
    """Scraper of the supervisors, with values by service and policy.

    It publishes the first values at once and changes at most every ``publish_s`` seconds, and then
    calls ``on_change``.
    """

    def __init__(
        self,
        store: Store,
        on_change: Callable[[Key], None],
        clock: Callable[[], float] = time.monotonic,
        port: int = METRICS_PORT,
        publish_s: float = DEFAULT_INTERVALS.publish,
    ) -> None:
        self._publish_s = publish_s
        self._store, self._on_change, self._clock = store, on_change, clock
        self._port = port
        self._published: dict[Key, tuple[float, dict[str, SupervisorMetrics]]] = {}
        self._latest: dict[Key, dict[str, SupervisorMetrics]] = {}
        self._rounds: dict[str, asyncio.Task[None]] = {}
        self._followed: dict[Key, dict[str, str]] = {}
        self._limit = asyncio.Semaphore(MAX_CONCURRENT_SCRAPES)
        self.failures = 0

    def get_published(self, key: Key) -> dict[str, SupervisorMetrics] | None:
        """Return the published values by pod name; None until the first scrape."""
        published = self._published.get(key)
        return published[1] if published else None

    def count_drained_pods(self) -> dict[Key, int]:
        """Return the number of pods that a person drained, by service or policy."""
        counts = {key: count_drained(found) for key, (_, found) in self._published.items()}
        return {key: count for key, count in counts.items() if count is not None}

    def get_latest(self, key: Key) -> dict[str, SupervisorMetrics]:
        """Return the values from the last scrape by pod name, for the pods that responded."""
        return self._latest.get(key, {})

    def set_addresses(self, key: Key, addresses: dict[str, str]) -> None:
        """Set the pods of a policy to scrape; ``addresses`` maps pod names to addresses."""
        self._followed[key] = addresses

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted service or policy."""
        for known in (self._published, self._latest, self._followed):
            known.pop(key, None)

    def publish(self, key: Key, metrics: dict[str, SupervisorMetrics]) -> None:
        """Publish the values ``metrics`` if they change the status and ``publish_s`` has passed."""
        now = self._clock()
        self._latest[key] = metrics
        known = self._published.get(key)
        if known and _list_status_parts(known[1]) == _list_status_parts(metrics):
            return
        early = known and make_memory_status(known[1]) and now - known[0] < self._publish_s
        if known and early and _has_same_drained_pods(known[1], metrics):
            return
        self._published[key] = (now, metrics)
        self._on_change(key)

    async def run(self, interval_s: float) -> None:
        """Scrape until cancelled; skip a namespace while its previous round is still running."""
        async with self.make_session() as session:
            try:
                while True:
                    await asyncio.sleep(interval_s)
                    self._start_rounds(session)
            finally:
                for task in self._rounds.values():
                    task.cancel()
                await asyncio.gather(*self._rounds.values(), return_exceptions=True)
                self._rounds.clear()

    def make_session(self) -> aiohttp.ClientSession:
        """Return an HTTP client that uses no proxies and no cookies, and decompresses nothing."""
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=MAX_CONCURRENT_SCRAPES),
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    def _start_rounds(self, session: aiohttp.ClientSession) -> None:
        by_namespace: dict[str, list[Key]] = defaultdict(list)
        for key in (*self._store.list_services(), *self._followed):
            by_namespace[key.namespace].append(key)
        for namespace, task in list(self._rounds.items()):
            if task.done():
                del self._rounds[namespace]
                task.result()  # raises if the task failed, which is a bug and restarts the part
        for namespace, keys in by_namespace.items():
            if namespace not in self._rounds:
                self._rounds[namespace] = asyncio.create_task(self._run_round(session, keys))

    async def _run_round(self, session: aiohttp.ClientSession, keys: list[Key]) -> None:
        namespace_limit = asyncio.Semaphore(MAX_CONCURRENT_PER_NAMESPACE)
        await asyncio.gather(*(self._scrape_service(session, namespace_limit, key) for key in keys))

    async def _scrape_service(
        self, session: aiohttp.ClientSession, namespace_limit: asyncio.Semaphore, key: Key
    ) -> None:
        addresses = self._followed.get(key)
        if addresses is None:
            addresses = {
                pod["metadata"]["name"]: address
                for pod in self._store.list_children(key, {"Pod"})
                if (address := find_address(pod))
            }
        results = await asyncio.gather(
            *(self._scrape_pod(session, namespace_limit, address) for address in addresses.values())
        )
        metrics = zip(addresses, results, strict=True)
        self.publish(key, {pod: one for pod, one in metrics if one is not None})

    async def _scrape_pod(
        self, session: aiohttp.ClientSession, namespace_limit: asyncio.Semaphore, address: str
    ) -> SupervisorMetrics | None:
        async with namespace_limit, self._limit:
            return await self.fetch_metrics(session, address)

    async def fetch_metrics(
        self, session: aiohttp.ClientSession, address: str
    ) -> SupervisorMetrics | None:
        """Return the values of the pod at ``address``; None if it has no valid metrics page."""
        try:
            return parse_metrics_page(await self._fetch_page(session, address))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, BadPageError) as error:
            self.failures += 1
            log.debug("failed to read the metrics of %s: %r", address, error)
            return None

    async def _fetch_page(self, session: aiohttp.ClientSession, address: str) -> bytes:
        host = address if PORT_PATTERN.search(address) else f"{address}:{self._port}"
        url = f"http://{host}/metrics"
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise BadPageError(f"HTTP {response.status}")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise BadPageError("the response is compressed")
            read = bytearray()
            async for chunk in response.content.iter_chunked(READ_CHUNK_BYTES):
                read += chunk
                if len(read) > MAX_PAGE_BYTES:
                    raise BadPageError(f"the page is larger than {MAX_PAGE_BYTES} bytes")
            return bytes(read)


def _list_status_parts(metrics: dict[str, SupervisorMetrics]) -> tuple[object, ...]:
    spent = {pod for pod, one in metrics.items() if one.restarts_left == 0}
    known = any(one.restarts_left is not None for one in metrics.values())
    slow = make_slow_leak_condition(ConditionType.SLOW_LEAK, metrics)
    return (
        make_memory_status(metrics),
        spent,
        known,
        slow.status,
        slow.message,
        list_drained_pods(metrics),
        find_pods_missing_signals(metrics),
        list_pods_near_limit(metrics, was_near_limit=False),
        list_pods_near_limit(metrics, was_near_limit=True),
    )


# Pods that did not respond are ignored.
def _has_same_drained_pods(
    previous: dict[str, SupervisorMetrics], metrics: dict[str, SupervisorMetrics]
) -> bool:
    return all(
        one.drained is None or one.drained == bool(pod in previous and previous[pod].drained)
        for pod, one in metrics.items()
    )


def find_address(pod: Object) -> str | None:
    """Return the address of a running pod, for use in a URL; None if the pod has none.

    Loopback, link-local (cloud metadata services) and multicast addresses are rejected.
    """
    status = pod.get("status") or {}
    if status.get("phase") != "Running":
        return None
    try:
        address = ipaddress.ip_address(status.get("podIP") or "")
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address
        return (
            None
            if address.scope_id or _is_unusable_address(inner)
            else f"[{address}]{_find_host_port(pod)}"
        )
    return None if _is_unusable_address(address) else f"{address}{_find_host_port(pod)}"


# As ``:PORT``; empty for the default port.
def _find_host_port(pod: Object) -> str:
    spec = pod.get("spec") or {}
    for one in (spec.get("initContainers") or ()) if spec.get("hostNetwork") else ():
        if one.get("name") == SUPERVISOR:
            ports = [port.get("containerPort") for port in one.get("ports") or ()]
            return next((f":{port}" for port in ports if port in HOST_PORTS), "")
    return ""


def _is_unusable_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    local = address.is_loopback or address.is_link_local
    return local or address.is_multicast or address.is_unspecified
