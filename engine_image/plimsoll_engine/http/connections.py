"""All connections of one server: at most so many, and each with an end."""

from __future__ import annotations

import time
from collections import Counter

from starlette.types import ASGIApp

from plimsoll_engine.http.connection import Connection, ErrorBody
from plimsoll_engine.http.limits import HttpLimits
from plimsoll_engine.http.slices import WAITING_BYTES

SPARE = 64
"""Above the bound, for connections whose one request is answered with 503."""
EVICTED_AT_ONCE = 16
"""The part of all connections that makes room together: who waits longest is looked for once for
many newcomers."""

REASONS = (
    "header_timeout", "write_timeout", "linger_timeout", "pipelined", "evicted", "refused",
)  # fmt: skip


class Connections:
    """The connections of one server.

    ``overloaded`` answers the requests of those that are too many. ``closed`` counts those that the
    server ended, by reason.
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
        """Parts of answers that wait for clients."""
        return sum(connection.nbytes for connection in self._open)

    @property
    def bound(self) -> int:
        """The most of them."""
        return (self.limits.max_connections + SPARE) * WAITING_BYTES

    def add(self, connection: Connection) -> None:
        """Take in a connection.

        Where it is one too many, those make room that wait longest for a client which has most
        connections; where all are at work it is refused.
        """
        if len(self._open) >= self.limits.max_connections:
            self._make_room()
        if len(self._open) >= self.limits.max_connections:
            self.ended("refused")
            if len(self._open) >= self.limits.max_connections + SPARE:
                connection.transport.abort()
                return
            connection.refuse()
        self._open[connection] = None

    def discard(self, connection: Connection) -> None:
        """Give up the place of a connection that has ended."""
        self._open.pop(connection, None)

    def ended(self, reason: str) -> None:
        """Count a connection that the server ended, by ``reason``."""
        self.closed[reason] += 1

    def sweep(self) -> None:
        """End those whose clients have had their time."""
        now = time.monotonic()
        for connection in list(self._open):
            connection.check(now)

    def _make_room(self) -> None:
        waiting = [connection for connection in self._open if not connection.working]
        if not waiting:
            return
        hosts = Counter(connection.host for connection in self._open)
        waiting.sort(key=lambda connection: (-hosts[connection.host], connection.since))
        for connection in waiting[: max(1, self.limits.max_connections // EVICTED_AT_ONCE)]:
            connection.abort("evicted")
            self.discard(connection)
