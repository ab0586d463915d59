"""``/metrics`` for Prometheus, ``/state`` for the terminal view, ``/`` for a browser: read-only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from plimsoll_sidecar import web
from plimsoll_sidecar.background import Part
from plimsoll_sidecar.record.hosts import Hosts
from plimsoll_sidecar.record.metrics import CONTENT_TYPE

SECURITY = "default-src 'none'; style-src 'unsafe-inline'"
"""No script runs and nothing is fetched."""
HEADERS = f"Content-Security-Policy: {SECURITY}\r\nX-Content-Type-Options: nosniff\r\n"
KEPT_S = 0.5
"""A page is made at most this often, however many clients ask: they share its bytes."""
IDLE_S = 60.0


class StateServer:
    """Serves what the callables return, from a thread of its own.

    ``page`` takes whether the page reloads itself. Raises OSError with host and port if the port is
    taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Callable[[], bytes],
        state: Callable[[], bytes],
        page: Callable[[bool], bytes],
        hosts: Hosts,
    ) -> None:
        html = "text/html; charset=utf-8"
        self._hosts = hosts
        self._pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": (html, cached(lambda: page(False))),
            "/live": (html, cached(lambda: page(True))),
            "/metrics": (CONTENT_TYPE, cached(metrics)),
            "/state": ("application/json", state),
            "/healthz": (web.TEXT, lambda: b"ok\n"),
        }
        try:
            self._server = web.HttpServer(host, port, self._answer, HEADERS)
        except OSError as error:
            raise OSError(f"metrics port {host}:{port}: {error.strerror}") from error
        self._wake, self._wake_write = os.pipe()
        self._server.watch(self._wake)
        self._part = Part("state-server", self._turn)

    @property
    def port(self) -> int:
        """The TCP port that it listens on, also where it was asked for port 0."""
        return self._server.port

    def start(self) -> None:
        """Begin to serve, in a thread that ends with the process."""
        self._part.start()

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._part.stop()
        os.write(self._wake_write, b"x")
        self._part.join()
        self._server.close()
        os.close(self._wake)
        os.close(self._wake_write)

    def _turn(self) -> float:
        self._server.turn(IDLE_S)
        return 0.0

    def _answer(self, request: web.Request) -> web.Answer:
        refused = self._hosts.refused(request.host)
        if refused is not None:
            return 403, web.TEXT, f"{refused}\n".encode()
        found = self._pages.get(request.path)
        if found is None:
            return 404, web.TEXT, f"not found; this server has {', '.join(self._pages)}\n".encode()
        content, make = found
        return 200, content, make()


def cached(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """``make``, whose result serves for the next half second. For one thread."""
    made, at = b"", float("-inf")

    def get() -> bytes:
        nonlocal made, at
        if time.monotonic() - at >= KEPT_S:
            made = make()
            at = time.monotonic()
        return made

    return get
