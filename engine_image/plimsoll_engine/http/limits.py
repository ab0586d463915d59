"""Limits of an HTTP server: connections, sizes and timeouts."""

from __future__ import annotations

import msgspec

KIB = 1024
MAX_SMALL_BODY_BYTES = 32 * KIB
"""Maximum size of a body without a reservation. Large bodies thus cannot block small ones."""
MIN_BODY_BYTES_PER_S = 16 * KIB
"""Received bytes that extend the timeout of a body by one second."""
MAX_BODY_TIMEOUT_S = 300.0
LINGER_TIMEOUT_S = 5.0
"""Time to read and discard the rest of a body after the request was answered early.

Otherwise, the connection would be reset before the client has read the answer.
"""
SOCKET_BUFFER_BYTES = 256 * KIB
"""Size of the kernel buffer of a connection, for each direction.

By default, the buffer grows to several MiB if a client does not read. This memory counts towards
the container's limit, but the ledger does not report it.
"""
MAX_HEADER_BYTES = 16 * KIB
"""Maximum size of a request line with its header fields. h11 enforces this limit."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an HTTP server. Times are in seconds.

    Attributes:
        idle_timeout_s: Maximum time between two requests on a connection.
        header_timeout_s: Maximum time to receive a header. It begins with the connection, or with
            the first byte of a later request.
        body_timeout_s: Maximum time to receive a body, which begins at the end of the header. Each
            :data:`MIN_BODY_BYTES_PER_S` received bytes extend it by one second.
        write_timeout_s: Maximum time for which a client may read no part of its response.

    """

    max_connections: int
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0

    def compute_body_timeout_s(self, received_bytes: int) -> float:
        """Return the timeout of a body in seconds, counted from the end of the header.

        ``received_bytes`` is the part of the body that was received so far.
        """
        return min(MAX_BODY_TIMEOUT_S, self.body_timeout_s + received_bytes / MIN_BODY_BYTES_PER_S)
