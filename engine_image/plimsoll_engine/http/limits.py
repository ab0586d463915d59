"""Limits of an HTTP server: connections, sizes and timeouts."""

from __future__ import annotations

import msgspec

KIB = 1024
SMALL_BODY_BYTES = 32 * KIB
"""Maximum size of bodies that need no reservation, so that large bodies cannot block small ones."""
MIN_BODY_RATE = 16 * KIB
"""Rate in bytes per second at which received bytes extend the body timeout."""
MAX_BODY_S = 300.0
LINGER_S = 5.0
"""Time to read and drop the rest of a body that was answered early.

Otherwise, the client would see a connection reset instead of the answer.
"""
SOCKET_BUFFER_BYTES = 256 * KIB
"""Size of the kernel buffer of a connection, for each direction.

Without a limit, it grows to several MiB if a client does not read. That memory counts for the
container, but no ledger reports it.
"""
HEADER_BYTES = 16 * KIB
"""Maximum size of a request line with its header fields. h11 enforces it."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an HTTP server. Times are in seconds.

    ``idle_timeout_s`` limits the time between two requests on a connection. ``header_timeout_s``
    limits the time from the first byte of a request, or the start of the connection, to the end of
    the header. ``body_timeout_s`` limits the time from there to the end of the body, extended by
    :data:`MIN_BODY_RATE`. ``write_timeout_s`` limits the time without progress while an answer
    waits for its client.
    """

    max_connections: int
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0

    def compute_body_deadline_s(self, received: int) -> float:
        """Return the body's timeout in seconds after the header, for ``received`` bytes."""
        return min(MAX_BODY_S, self.body_timeout_s + received / MIN_BODY_RATE)
