"""The operator's own ``/healthz`` and ``/metrics``.

Healthy means that reconciling works: a canary lists one InferenceService through the same client
(it only reads), and the tasks that do the work are alive. A quiet cluster sends no events, so the
age of the last one is a metric and not a verdict.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_operator.api import Api, ApiError
from plimsoll_operator.config import Config
from plimsoll_operator.kinds import SERVICE
from plimsoll_operator.scrape import Scraper
from plimsoll_operator.store import Key, Store
from plimsoll_operator.watch import Watches
from plimsoll_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

CANARY_S = 20.0
STALE_S = 120.0
"""Unhealthy when the canary was last well this long ago: six of its turns."""


class Health(Collector):
    """Answers by what the parts say of themselves."""

    def __init__(
        self,
        api: Api,
        store: Store,
        queue: WorkQueue[Key],
        watches: Watches,
        scraper: Scraper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._store, self._queue = api, store, queue
        self._watches, self._scraper, self._clock = watches, scraper, clock
        self._well = clock()

    @property
    def canary_age_s(self) -> float:
        """Seconds since the API server last answered the canary."""
        return self._clock() - self._well

    async def canary(self, config: Config) -> None:
        """Reads for ever, and never writes."""
        while True:
            try:
                for namespace in config.namespaces or (None,):
                    await self._api.probe(SERVICE, namespace)
                self._well = self._clock()
            except (ApiError, OSError, TimeoutError) as error:
                log.warning("canary: %s", error or repr(error))
            await asyncio.sleep(CANARY_S)

    def collect(self) -> Iterable[Metric]:
        """Metrics at the time of a scrape."""
        yield _gauge("watch_age_seconds", "Time since the last watch event.", self._watches.age_s)
        yield _gauge("canary_age_seconds", "Time since the canary read well.", self.canary_age_s)
        yield _gauge("queue_length", "Services that wait for a worker.", len(self._queue))
        known = len(self._store.services())
        yield _gauge("services", "InferenceServices known.", known)
        yield _counter("reconciles", "Reconciles, failed ones included.", self._queue.handled)
        yield _counter("reconcile_failures", "Reconciles that failed.", self._queue.failed)
        yield _counter("watch_events", "Events of all watches.", self._watches.events)
        yield _counter("scrape_failures", "Scrapes without an answer.", self._scraper.failures)
        writes = CounterMetricFamily(
            "plimsoll_operator_writes", "Writes to the API server.", labels=("verb", "kind")
        )
        for (verb, kind), count in sorted(self._api.writes.items()):
            writes.add_metric((verb, kind), count)
        yield writes

    async def serve(self, port: int) -> web.AppRunner:
        """Serves on all interfaces; OSError where the port is taken."""
        registry = CollectorRegistry()
        registry.register(self)

        async def healthz(_: web.Request) -> web.Response:
            age = self.canary_age_s
            text = (
                f"canary read {age:.0f} s ago, last watch event {self._watches.age_s:.0f} s ago\n"
            )
            return web.Response(text=text, status=200 if age < STALE_S else 503)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(
                body=generate_latest(registry),
                headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
            )

        app = web.Application()
        app.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, port=port).start()
        return runner


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"plimsoll_operator_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"plimsoll_operator_{name}", text, value=value)
