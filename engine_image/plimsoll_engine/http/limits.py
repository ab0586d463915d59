"""Limits of an HTTP server: connections, sizes and timeouts."""

from __future__ import annotations

import msgspec

KIB = 1024
# Bodies up to this size need no reservation, so large bodies cannot block them.
MAX_SMALL_BODY_BYTES = 32 * KIB
# Received bytes that extend the timeout of a body by one second.
MIN_BODY_BYTES_PER_S = 16 * KIB
MAX_BODY_TIMEOUT_S = 300.0
# Time to discard the rest of a body that was answered early. If the connection were reset instead,
# the client could lose the answer.
LINGER_TIMEOUT_S = 5.0
# Per connection and direction. By default, the kernel's buffer grows to several MiB if a client
# does not read. This memory counts towards the container's limit, but is not in the ledger.
SOCKET_BUFFER_BYTES = 256 * KIB
# Enforced by h11 for the request line and its header fields.
MAX_HEADER_BYTES = 16 * KIB
# A body may have this many chunks of any size, and further ones of this size on average.
MAX_SMALL_CHUNKS = 2048
MIN_CHUNK_BYTES = 128


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an HTTP server.

    Attributes:
        idle_timeout_s: Maximum time between two requests on a connection.
        header_timeout_s: Maximum time to receive a header, from the connection or, for a later
            request, from its first byte on.
        body_timeout_s: Maximum time to receive a body. Each :data:`MIN_BODY_BYTES_PER_S` received
            bytes extend it by one second.
        write_timeout_s: Maximum time for which a client may read no part of its response.

    """

    max_connections: int
    idle_timeout_s: float = 5.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0

    def compute_body_timeout_s(self, received_bytes: int) -> float:
        """Return the timeout of a body, in seconds since the end of its header."""
        return min(MAX_BODY_TIMEOUT_S, self.body_timeout_s + received_bytes / MIN_BODY_BYTES_PER_S)
