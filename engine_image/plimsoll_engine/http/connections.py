"""Registry of a server's connections, which limits their number."""

from __future__ import annotations

import time
from collections import Counter

from starlette.types import ASGIApp

from plimsoll_engine.http.connection import Connection, ErrorBodyEncoder
from plimsoll_engine.http.limits import HttpLimits
from plimsoll_engine.http.slices import MAX_WRITE_BUFFER_BYTES

# Connections beyond the limit that get status 503. Further ones are closed at once.
MAX_REFUSED_CONNECTIONS = 64
# Fraction of the maximum number of connections that is evicted to make room.
EVICTED_FRACTION = 1 / 16

CLOSE_REASONS = (
    "header_timeout", "write_timeout", "linger_timeout", "pipelined", "evicted", "refused",
)  # fmt: skip


class Connections:
    """Registry of a server's open connections.

    ``overload_app`` answers requests on connections beyond the limit.
    """

    def __init__(
        self, limits: HttpLimits, overload_app: ASGIApp, error_body: ErrorBodyEncoder
    ) -> None:
        self.limits = limits
        self.overload_app = overload_app
        self.error_body = error_body
        self.closed: Counter[str] = Counter(dict.fromkeys(CLOSE_REASONS, 0))
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unsent_bytes(self) -> int:
        """Number of response bytes in the write buffers of all connections."""
        return sum(connection.unsent_bytes for connection in self._open)

    @property
    def max_unsent_bytes(self) -> int:
        """Maximum of ``unsent_bytes``."""
        return (self.limits.max_connections + MAX_REFUSED_CONNECTIONS) * MAX_WRITE_BUFFER_BYTES

    def add(self, connection: Connection) -> None:
        """Register ``connection``, evicting idle connections if needed, or refuse it."""
        if len(self._open) >= self.limits.max_connections:
            self._evict_idle()
        if len(self._open) >= self.limits.max_connections:
            self.count_closed("refused")
            if len(self._open) >= self.limits.max_connections + MAX_REFUSED_CONNECTIONS:
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

    def close_timed_out(self) -> None:
        """Close the connections whose clients exceeded a timeout."""
        now = time.monotonic()
        for connection in list(self._open):
            connection.close_if_timed_out(now)

    def _evict_idle(self) -> None:
        idle = [connection for connection in self._open if not connection.is_answering]
        if not idle:
            return
        hosts = Counter(connection.host for connection in self._open)
        idle.sort(key=lambda connection: (-hosts[connection.host], connection.idle_since))
        for connection in idle[: max(1, int(self.limits.max_connections * EVICTED_FRACTION))]:
            connection.abort("evicted")
            self.discard(connection)
