"""Serve the operator's ``/healthz``, ``/readyz`` and ``/metrics``, and its page if enabled.

The operator is healthy if the event loop responds and no watch is stale, because a restart can fix
only these faults. It is ready if it has listed all objects once or is a standby, and if its
webhook, if any, can respond.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from aiohttp import web

from plimsoll_operator.config import Config
from plimsoll_operator.kinds import DEFINED_KINDS, SERVICE
from plimsoll_operator.metrics import Metrics
from plimsoll_operator.page import HEADERS, FleetPage, explain_refused_host
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.watches import Watches

log = logging.getLogger(__name__)

MIN_LISTS_WITH_MISSED_EVENTS = 2


class HealthServer:
    """Server of the health endpoints and metrics."""

    def __init__(self, api: Api, watches: Watches, metrics: Metrics, config: Config) -> None:
        self._api, self._watches, self._metrics, self._config = api, watches, metrics, config
        self._last_success_at = time.monotonic()
        self.ready = False
        self.webhook: Callable[[], str | None] = lambda: None
        """Function that returns the webhook's problem; None if there is none."""

    def measure_canary_age_s(self) -> float:
        """Return the seconds since the API server last responded to the canary."""
        return time.monotonic() - self._last_success_at

    async def wait_for_definitions(self) -> None:
        """Wait until Plimsoll's CustomResourceDefinitions are installed.

        Raises :class:`ApiError`, OSError or TimeoutError if the API server does not respond.
        """
        logged = ""
        while missing := [
            kind.crd_name for kind in DEFINED_KINDS if not await self._api.serves(kind)
        ]:
            self._last_success_at = time.monotonic()
            if logged != (logged := ", ".join(missing)):
                log.warning(
                    "waiting for the CRDs of %s: install them with kubectl apply -k config", logged
                )
            await asyncio.sleep(self._config.intervals.definitions)
        if logged:
            log.info("the CRDs are installed")

    async def run_canary(self) -> None:
        """List one InferenceService in a loop until cancelled."""
        while True:
            try:
                for namespace in self._config.namespaces or (None,):
                    await self._api.probe(SERVICE, namespace)
                self._last_success_at = time.monotonic()
            except (ApiError, OSError, TimeoutError) as error:
                log.warning(
                    "the canary failed to read from the API server: %s", str(error) or repr(error)
                )
            await asyncio.sleep(self._config.intervals.canary)

    def find_liveness_fault(self) -> str | None:
        """Return a description of a fault that a restart can fix, or None."""
        stale = self._watches.list_stale_kinds(MIN_LISTS_WITH_MISSED_EVENTS)
        kinds = ", ".join(stale)
        return f"the watches of {kinds} are stale: they did not report a change" if stale else None

    def find_unready_reason(self) -> str | None:
        """Return why the operator is not ready; None if it is ready."""
        if not self.ready:
            return "the operator has not yet listed all objects"
        problem = self.webhook()
        return f"webhook: {problem}" if problem else None

    async def serve(self, port: int, page: FleetPage | None = None) -> web.AppRunner:
        """Serve on all interfaces, with ``page`` at ``/``. Raises OSError if the port is in use."""

        async def healthz(_: web.Request) -> web.Response:
            wrong = self.find_liveness_fault()
            text = wrong or (
                f"the canary last read from the API server {self.measure_canary_age_s():.0f} s ago"
            )
            return web.Response(text=f"{text}\n", status=503 if wrong else 200)

        async def readyz(_: web.Request) -> web.Response:
            wrong = self.find_unready_reason()
            return web.Response(text=f"{wrong or 'ready'}\n", status=503 if wrong else 200)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(
                body=self._metrics.render_page(),
                headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
            )

        async def fleet(request: web.Request) -> web.Response:
            if wrong := explain_refused_host(request.headers.get("Host")):
                return web.Response(text=f"{wrong}\n", status=403)
            assert page is not None
            return web.Response(
                body=await page.get_page(),
                content_type="text/html",
                charset="utf-8",
                headers=HEADERS,
            )

        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", healthz),
                web.get("/readyz", readyz),
                web.get("/metrics", metrics),
                *([web.get("/", fleet)] if page else ()),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, port=port).start()
        return runner
