"""Limits of an HTTP server: connections, sizes and timeouts."""

from __future__ import annotations

import msgspec

KIB = 1024
SMALL_BODY_BYTES = 32 * KIB
"""Bodies up to this size need no reservation, so that large bodies cannot block small requests."""
MIN_BODY_RATE = 16 * KIB
"""Bytes per second. Each received byte extends the body timeout accordingly."""
MAX_BODY_S = 300.0
LINGER_S = 5.0
"""Seconds to read and drop the rest of a body that was answered early, so that the client reads the
answer instead of a connection reset."""
SOCKET_BUFFER_BYTES = 256 * KIB
"""Kernel buffer of a connection, for each direction. Without a limit it grows to several MiB for a
client that does not read. That memory counts for the container, but no ledger reports it."""
HEADER_BYTES = 16 * KIB
"""Maximum size of a request line with its header fields, enforced by h11."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an HTTP server; times are in seconds.

    ``idle_timeout_s``: between two requests of a connection. ``header_timeout_s``: from the first
    byte of a request, or the start of the connection, to the end of the header. ``body_timeout_s``:
    from there to the end of the body, extended by :data:`MIN_BODY_RATE`. ``write_timeout_s``:
    without progress while an answer waits for its client.
    """

    max_connections: int
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0

    def body_deadline_s(self, received: int) -> float:
        """Return the body timeout in seconds after the header, given ``received`` bytes of body."""
        return min(MAX_BODY_S, self.body_timeout_s + received / MIN_BODY_RATE)
