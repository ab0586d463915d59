"""Connections of this network whose last word came from the client.

They are requests that wait for the first byte of their answer.

A connection that is only open says nothing: balancers keep them. The kernel knows when data last
came in and went out on each socket (``tcp_info`` through sock_diag), for any process's sockets and
without a permission. It knows that to its tick, 1 to 10 ms: a request that follows an answer within
one tick looks answered, and is not counted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLMSG_DONE = 20, 2, 3
REQUEST_DUMP = 0x301
TCP_ESTABLISHED, INET_DIAG_INFO = 1, 2
LAST_SENT, LAST_RECEIVED, RECEIVED, SEGMENTS_SENT = 44, 52, 128, 156
"""Offsets in ``struct tcp_info`` (include/uapi/linux/tcp.h), which only ever grows at its end."""
MIN_INFO_BYTES = 160
MIN_WAIT_MS = 500
"""Most requests are answered sooner, and are counted by the engine anyway."""
WAIT_S = 0.5
MAX_BYTES = 4 << 20


def unanswered(port: int) -> int | None:
    """Return how many wait at the local ``port`` for half a second or longer.

    None where the kernel does not tell.
    """
    count = 0
    try:
        for family in (socket.AF_INET, socket.AF_INET6):
            count += sum(1 for info in _sockets(family, port) if _waits(info))
    except (OSError, struct.error):
        return None
    return count


def _waits(info: bytes) -> bool:
    if len(info) < MIN_INFO_BYTES:
        return False
    sent_ms, received_ms = (_u32(info, at) for at in (LAST_SENT, LAST_RECEIVED))
    (received,) = struct.unpack_from("=Q", info, RECEIVED)
    if not received or received_ms < MIN_WAIT_MS:
        return False
    return _u32(info, SEGMENTS_SENT) == 0 or received_ms < sent_ms


def _sockets(family: int, port: int) -> list[bytes]:
    """``tcp_info`` of every established socket at ``port``."""
    found: list[bytes] = []
    with contextlib.closing(
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
    ) as link:
        link.settimeout(WAIT_S)
        ask = struct.pack(
            "=BBBxI", family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 1 << TCP_ESTABLISHED
        )
        body = ask + bytes(48)
        size = 16 + len(body)
        link.send(struct.pack("=IHHII", size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + body)
        total = 0
        while total < MAX_BYTES:
            data = link.recv(1 << 16)
            total += len(data)
            if _take(data, port, found):
                break
    return found


def _take(data: bytes, port: int, found: list[bytes]) -> bool:
    """Take one datagram in; True at the end of the list."""
    at = 0
    while at + 16 <= len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        if kind == NLMSG_DONE:
            return True
        if kind == NLMSG_ERROR:
            raise OSError(-struct.unpack_from("=i", data, at + 16)[0], os.strerror(0))
        # inet_diag_msg: family, state, timer, retrans, then the local port in network order.
        if struct.unpack_from("!H", data, at + 20)[0] == port:
            found += _attribute(data[at + 16 + 72 : at + size])
        at += max(16, (size + 3) & ~3)
    return False


def _attribute(data: bytes) -> list[bytes]:
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if kind == INET_DIAG_INFO:
            return [data[at + 4 : at + size]]
        at += max(4, (size + 3) & ~3)
    return []


def _u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("=I", data, at)[0]
    return value
