"""Pods of a multi-node group, each at an address of its own with a ``/state`` page."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORKER, OTHER = "127.0.0.2", "127.0.0.3"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def serving(address: str, port: int, body: bytes, status: int = 200) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/state" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer((address, port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((WORKER, 0))
        return int(probe.getsockname()[1])
