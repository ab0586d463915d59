"""``/metrics`` for Prometheus, ``/state`` for the terminal view, ``/`` for a browser: read-only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plimsoll_sidecar.record.metrics import CONTENT_TYPE

REQUEST_S = 10.0
SECURITY = "default-src 'none'; style-src 'unsafe-inline'"
"""No script runs and nothing is fetched."""


class StateServer:
    """Serves what the callables return, from a thread of its own.

    ``page`` is told whether the browser shall load it again.
    Raises OSError with host and port where the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Callable[[], bytes],
        state: Callable[[], bytes],
        page: Callable[[bool], bytes],
    ) -> None:
        html = "text/html; charset=utf-8"
        pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": (html, lambda: page(False)),
            "/live": (html, lambda: page(True)),
            "/metrics": (CONTENT_TYPE, metrics),
            "/state": ("application/json", state),
            "/healthz": ("text/plain", lambda: b"ok\n"),
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0])
                if page is None:
                    self.send_error(404)
                    return
                content, make = page
                body = make()
                self.send_response(200)
                self.send_header("Content-Type", content)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", SECURITY)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise OSError(f"metrics port {host}:{port}: {error.strerror}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="state-server", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
