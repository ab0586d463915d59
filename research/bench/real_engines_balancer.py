"""A balancer as a Service is one: new connections go to replicas that are ready, in turn."""

from __future__ import annotations

import contextlib
import itertools
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

PROBE_S = 1.0
CONNECT_S = 5.0
PIECE = 1 << 16


@dataclass
class Backend:
    """``is_ready`` is asked once a second; it may raise OSError, which means no."""

    port: int
    is_ready: Callable[[], bool]
    ready: bool = field(default=False, init=False)


class Balancer:
    """Passes connections through. One that is open stays with its backend, whatever becomes of it;
    without a ready backend a connection is closed. :meth:`close` ends it."""

    def __init__(self, backends: list[Backend]) -> None:
        self._backends, self._turns = backends, itertools.count()
        self._ending = threading.Event()
        balancer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                balancer._pass(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        for run in (self._server.serve_forever, *(self._watcher(one) for one in backends)):
            threading.Thread(target=run, daemon=True).start()

    @property
    def ready(self) -> int:
        """How many backends are ready."""
        return sum(one.ready for one in self._backends)

    def close(self) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()

    def _watcher(self, backend: Backend) -> Callable[[], None]:
        def watch() -> None:
            while not self._ending.is_set():
                try:
                    backend.ready = backend.is_ready()
                except OSError:
                    backend.ready = False
                self._ending.wait(PROBE_S)

        return watch

    def _pass(self, client: socket.socket) -> None:
        ready = [one for one in self._backends if one.ready]
        if not ready:
            return
        chosen = ready[next(self._turns) % len(ready)]
        try:
            server = socket.create_connection(("127.0.0.1", chosen.port), CONNECT_S)
        except OSError:
            return
        server.settimeout(None)
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        with server:
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copies until ``source`` ends, and tells ``sink`` so."""
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            sink.sendall(piece)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
