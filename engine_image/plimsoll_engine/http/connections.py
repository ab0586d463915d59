"""Limit the number of a server's connections, and evict idle connections."""

from __future__ import annotations

import time
from collections import Counter

from starlette.types import ASGIApp

from plimsoll_engine.http.connection import Connection, ErrorBody
from plimsoll_engine.http.limits import HttpLimits
from plimsoll_engine.http.slices import WAITING_BYTES

REFUSED_CONNECTIONS = 64
"""Number of connections beyond the limit that get a 503 answer. Further ones are closed."""
EVICTION_DIVISOR = 16
"""Divisor of the maximum number of connections: how many are evicted together."""

REASONS = (
    "header_timeout", "write_timeout", "linger_timeout", "pipelined", "evicted", "refused",
)  # fmt: skip


class Connections:
    """Open connections of a server.

    ``overloaded`` answers requests on connections beyond the limit. ``closed`` counts the
    connections that the server closed, by reason.
    """

    def __init__(self, limits: HttpLimits, overloaded: ASGIApp, error_body: ErrorBody) -> None:
        self.limits = limits
        self.overloaded = overloaded
        self.error_body = error_body
        self.closed: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def nbytes(self) -> int:
        """Number of answer bytes that wait in write buffers."""
        return sum(connection.nbytes for connection in self._open)

    @property
    def bound(self) -> int:
        """Maximum of ``nbytes``."""
        return (self.limits.max_connections + REFUSED_CONNECTIONS) * WAITING_BYTES

    def add(self, connection: Connection) -> None:
        """Register ``connection``.

        If the limit is reached, first evict the connections that have waited longest for a request,
        from the host with the most connections. If all connections are busy, refuse the new one.
        """
        if len(self._open) >= self.limits.max_connections:
            self._make_room()
        if len(self._open) >= self.limits.max_connections:
            self.count_closed("refused")
            if len(self._open) >= self.limits.max_connections + REFUSED_CONNECTIONS:
                connection.transport.abort()
                return
            connection.refuse()
        self._open[connection] = None

    def discard(self, connection: Connection) -> None:
        """Remove ``connection``."""
        self._open.pop(connection, None)

    def count_closed(self, reason: str) -> None:
        """Count a connection that the server closed for ``reason``."""
        self.closed[reason] += 1

    def sweep(self) -> None:
        """Close the connections whose clients exceeded a timeout."""
        now = time.monotonic()
        for connection in list(self._open):
            connection.check(now)

    def _make_room(self) -> None:
        waiting = [connection for connection in self._open if not connection.working]
        if not waiting:
            return
        hosts = Counter(connection.host for connection in self._open)
        waiting.sort(key=lambda connection: (-hosts[connection.host], connection.idle_since))
        for connection in waiting[: max(1, self.limits.max_connections // EVICTION_DIVISOR)]:
            connection.abort("evicted")
            self.discard(connection)
