"""Connections of this network whose last word came from the client.

They are requests that wait for the first byte of their answer.

A connection that is only open says nothing: balancers keep them. The kernel knows when data last
came in and went out on each socket (``tcp_info`` through sock_diag), for any process's sockets and
without a permission. It knows that to its tick, 1 to 10 ms: a request that follows an answer within
one tick looks answered, and is not counted.
"""

from __future__ import annotations

import struct

from plimsoll_sidecar.signals.process import sock_diag
from plimsoll_sidecar.signals.process.tcp_sockets import ESTABLISHED

INET_DIAG_INFO = 2
LAST_SENT, LAST_RECEIVED, RECEIVED, SEGMENTS_SENT = 44, 52, 128, 156
"""Offsets in ``struct tcp_info`` (include/uapi/linux/tcp.h), which only ever grows at its end."""
MIN_INFO_BYTES = 160
MIN_WAIT_MS = 500
"""Most requests are answered sooner, and are counted by the engine anyway."""


def unanswered(port: int) -> int | None:
    """Return how many wait at the local ``port`` for half a second or longer.

    None where the kernel does not tell.
    """
    try:
        return sum(
            _waits(one.attributes.get(INET_DIAG_INFO, b""))
            for one in sock_diag.tcp_sockets(port, ESTABLISHED, INET_DIAG_INFO)
        )
    except (OSError, struct.error):
        return None


def _waits(info: bytes) -> bool:
    if len(info) < MIN_INFO_BYTES:
        return False
    sent_ms, received_ms = (_u32(info, at) for at in (LAST_SENT, LAST_RECEIVED))
    (received,) = struct.unpack_from("=Q", info, RECEIVED)
    if not received or received_ms < MIN_WAIT_MS:
        return False
    return _u32(info, SEGMENTS_SENT) == 0 or received_ms < sent_ms


def _u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("=I", data, at)[0]
    return value
