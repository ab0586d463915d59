"""Serve the webhook over HTTPS in every replica, including standbys.

Clients are untrusted, and the event loop must stay free to renew the leader's Lease. The server
therefore limits connections, request bodies and queued reviews, and processes reviews in a thread
pool.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from plimsoll_operator.admission.configuration import WEBHOOK_TIMEOUT_S
from plimsoll_operator.admission.review import REVIEW_RESULTS, PolicyCache, Reviewer
from plimsoll_operator.admission.upkeep import WebhookMetrics, WebhookReconciler
from plimsoll_operator.config import Config, WebhookSettings
from plimsoll_operator.runtime.background import BackgroundTasks
from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.watches import PolicyWatch

log = logging.getLogger(__name__)

WEBHOOK_PATH = "/pods"
RESPONSE_TIMEOUT_S = WEBHOOK_TIMEOUT_S * 0.75
MAX_REVIEW_BYTES = 1 << 20
"""Maximum size of a review; a larger pod is created without a supervisor."""
REVIEW_THREADS = 2
SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval: the time for which a review may hold the GIL while the event
loop waits."""
MAX_WAITING_REVIEWS = 64
"""Maximum number of reviews in progress or queued; a review takes about 3 ms."""
MAX_CONNECTIONS = 512
MAX_CONCURRENT_BODIES = 32
"""Maximum number of request bodies read at the same time, which limits their memory."""
HANDSHAKE_TIMEOUT_S, HEAD_TIMEOUT_S, IDLE_TIMEOUT_S = 2.0, 5.0, 100.0
"""Timeouts of a connection. An API server closes a connection after 90 s without a request."""
LOG_INTERVAL_S = 10.0
"""Minimum time between log lines about rejected reviews."""


class AdmissionServer:
    """HTTPS server that calls ``review`` with each request body, in a thread pool."""

    def __init__(self, review: Callable[[bytes], bytes], on_rejected: Callable[[], None]) -> None:
        self._review, self._failed = review, on_rejected
        self._pool = ThreadPoolExecutor(REVIEW_THREADS, thread_name_prefix="review")
        self._waiting = 0
        self._open: dict[RequestHandler, float] = {}
        """Idle deadline of each connection, most recently active last."""
        self._bodies = asyncio.Semaphore(MAX_CONCURRENT_BODIES)
        self._last_log = float("-inf")
        self.listening = asyncio.Event()

    async def run(self, port: int, context: Any) -> None:
        """Serve on all interfaces until cancelled. Raises OSError if the port is in use."""
        app = web.Application(client_max_size=MAX_REVIEW_BYTES)
        app.add_routes([web.post(WEBHOOK_PATH, self._respond)])
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            server = await loop.create_server(
                partial(self._accept, runner.server.__call__), None, port, ssl=context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S, reuse_address=True,
                reuse_port=_CAN_REUSE_PORT,
            )  # fmt: skip
            log.info("the admission webhook listens on port %d", port)
            async with server:
                self.listening.set()
                await server.serve_forever()
        finally:
            self.listening.clear()
            await runner.cleanup()

    # Too many connections: the one that was idle for the longest time is closed.
    def _accept(self, make_handler: Callable[[], RequestHandler]) -> RequestHandler:
        if len(self._open) >= MAX_CONNECTIONS:
            self._close(next(iter(self._open)))
        handler = make_handler()
        self._extend_deadline(handler, HEAD_TIMEOUT_S)
        self._close_idle_connection(handler)
        return handler

    def _extend_deadline(self, handler: RequestHandler, idle_s: float) -> None:
        self._open.pop(handler, None)
        self._open[handler] = asyncio.get_running_loop().time() + idle_s

    def _close_idle_connection(self, handler: RequestHandler) -> None:
        loop = asyncio.get_running_loop()
        until = self._open.get(handler, 0.0)
        if loop.time() >= until:
            self._close(handler)
        else:
            loop.call_at(until, self._close_idle_connection, handler)

    def _close(self, handler: RequestHandler) -> None:
        self._open.pop(handler, None)
        if handler.transport is not None:
            handler.transport.abort()

    async def _respond(self, request: web.Request) -> web.Response:
        self._extend_deadline(request.protocol, IDLE_TIMEOUT_S)
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                async with self._bodies:
                    body = await request.read()
                if self._waiting >= MAX_WAITING_REVIEWS:
                    return self._reject("too many AdmissionReviews are waiting", 429)
                loop = asyncio.get_running_loop()
                work = loop.run_in_executor(self._pool, self._review, body)
                # A running thread cannot be cancelled, so count its review until it finishes.
                self._waiting += 1
                work.add_done_callback(self._on_review_finished)
                text = await asyncio.shield(work)
        except TimeoutError:
            return self._reject(
                f"the AdmissionReview was not processed within {RESPONSE_TIMEOUT_S:g} s", 504
            )
        except web.HTTPRequestEntityTooLarge:
            return self._reject(f"the AdmissionReview is larger than {MAX_REVIEW_BYTES} bytes", 413)
        except ValueError as error:
            return self._reject(f"the request body is not a valid AdmissionReview: {error}", 400)
        return web.Response(body=text, content_type="application/json")

    def _on_review_finished(self, future: asyncio.Future[bytes]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # mark the exception as retrieved

    def _reject(self, reason: str, status: int) -> web.Response:
        self._failed()
        now = asyncio.get_running_loop().time()
        if now - self._last_log >= LOG_INTERVAL_S:
            self._last_log = now
            log.warning(
                (
                    "the admission webhook could not process a request: %s; the pod is created"
                    " without a supervisor"
                ),
                reason,
            )
        return web.Response(text=f"{reason}\n", status=status)

    def stop(self) -> None:
        """Cancel all queued reviews."""
        self._pool.shutdown(wait=False, cancel_futures=True)


_CAN_REUSE_PORT = hasattr(socket, "SO_REUSEPORT")


class AdmissionWebhook:
    """Webhook with its server, certificate and configuration.

    Call ``start`` before the leader election and ``stop`` at exit.
    """

    def __init__(
        self,
        api: Api,
        config: Config,
        webhook: WebhookSettings,
        is_leader: Callable[[], bool],
        metrics: WebhookMetrics,
        watch: PolicyWatch,
    ) -> None:
        policies = PolicyCache()
        watch.on_change = policies.update
        for result in REVIEW_RESULTS:
            metrics.count_admitted(result, 0)
        self._folder = Path(tempfile.mkdtemp(prefix="plimsoll-webhook-"))
        self._port = webhook.port
        review = Reviewer(policies, config.images, metrics.count_admitted, config.max_waiting_pods)
        self._server = AdmissionServer(
            review.respond_to_body, partial(metrics.count_admitted, "failed")
        )
        self._upkeep = WebhookReconciler(
            api, policies, webhook, config, is_leader, self._folder, metrics, watch.is_current
        )
        metrics.add_webhook_health(f"{webhook.namespace}/{webhook.name}", self.find_problem)
        self._tasks: list[asyncio.Task[None]] = []

    def is_current(self) -> bool:
        """Report whether pods that are created now get a supervisor under the current policies."""
        return self._upkeep.is_current()

    def find_problem(self) -> str | None:
        """Return why this replica cannot respond to the API server; None if it can."""
        if problem := self._upkeep.find_problem():
            return problem
        return (
            None
            if self._server.listening.is_set()
            else (f"the webhook is not listening on port {self._port}")
        )

    def find_unready_reason(self) -> str | None:
        """Return why this replica is not ready; None if it is ready or waits for the leader."""
        return None if self._upkeep.is_waiting_for_leader() else self.find_problem()

    def start(self, background: BackgroundTasks) -> None:
        """Start serving; after a failure, the operator continues, but pods get no supervisor."""
        parts: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "admission": self._serve,
            "admission-upkeep": self._upkeep.run,
        }
        for name, part in parts.items():
            supervised = partial(background.run_forever, name, part, is_required=False)
            self._tasks.append(asyncio.create_task(supervised()))

    async def stop(self) -> None:
        """Stop serving and delete the certificate files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self) -> None:
        await self._upkeep.serving.wait()
        await self._server.run(self._port, self._upkeep.context)
