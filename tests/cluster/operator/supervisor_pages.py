"""Supervisors as the operator scrapes them, and what it publishes to those of a service."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

from plimsoll_api.names import METRICS_PORT
from plimsoll_sidecar.record.metrics import Metrics
from tests.cluster.operator.test_fleet_safety import SELECTOR
from tests.cluster.operator.test_lifecycle import own_address


@contextlib.contextmanager
def supervisors(page: Callable[[], Metrics]) -> Iterator[str]:
    """The address of a machine whose supervisors answer with ``page``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page().render())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer((own_address(), METRICS_PORT), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield own_address()
    server.shutdown()
    thread.join()
    server.server_close()


def pods_of(kubectl: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.list("pods", SELECTOR)
    return found


def data(kubectl: Any) -> dict[str, str]:
    found: dict[str, str] = kubectl.get("configmap", "tiny-supervisor")["data"]
    return found
