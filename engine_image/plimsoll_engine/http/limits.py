"""What one HTTP server grants its clients: how many connections, and how long each may take."""

from __future__ import annotations

import msgspec

KIB = 1024
SMALL_BODY_BYTES = 32 * KIB
"""A body up to this size is always read. Together with the bound on connections it bounds what
such bodies take, so that no large one can keep a small one out."""
MIN_BODY_RATE = 16 * KIB
"""Bytes a second. A body may take the time-out, and as much longer as this rate needs for it."""
MAX_BODY_S = 300.0
LINGER_S = 5.0
"""After an answer that came before the end of the body: as long is the rest read and dropped, so
that the client finds the answer and not a reset connection."""
SOCKET_BUFFER_BYTES = 256 * KIB
"""Of the kernel, for each direction of a connection. By itself it grows to several MiB for a client
that does not read, in memory that counts for the container and that no ledger knows."""
HEADER_BYTES = 16 * KIB
"""Of a request's line and header fields, as h11 takes them."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """All times are seconds.

    ``idle_timeout_s``: between two requests of a connection. ``header_timeout_s``: from a
    connection, or the first byte of a further request, to the end of the header.
    ``body_timeout_s``: from there to the end of the body, longer for large ones
    (:data:`MIN_BODY_RATE`). ``write_timeout_s``: how long a client may take nothing of an answer
    that waits for it; each byte that it takes starts the time again.
    """

    max_connections: int
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0

    def body_deadline_s(self, received: int) -> float:
        """Seconds after the header at which a body is late of which ``received`` bytes came."""
        return min(MAX_BODY_S, self.body_timeout_s + received / MIN_BODY_RATE)
