"""The kernel's list of TCP sockets in some states (sock_diag(7)), of this network, no permission.

It looks at the sockets of these states only. A read of ``/proc/net/tcp`` walks through the table of
all connections: milliseconds on a machine with a large one, also where only listeners are wanted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLMSG_DONE = 20, 2, 3
REQUEST_DUMP = 0x301
WAIT_S = 0.5
MAX_BYTES = 4 << 20
HEADER_BYTES, MESSAGE_BYTES = 16, 72
"""``struct nlmsghdr`` and ``struct inet_diag_msg`` (include/uapi/linux)."""
PORT, INODE = 4, 68
"""Offsets in ``struct inet_diag_msg``: the local port in network order, and the inode."""


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A socket. ``attributes`` are the kernel's, by number, as it sends them."""

    inode: int
    attributes: dict[int, bytes]


def tcp_sockets(port: int, state: int, attribute: int = 0) -> Iterator[TcpSocket]:
    """Yield the sockets at the local ``port`` in ``state``, with ``attribute`` where one is named.

    States have the numbers of include/net/tcp_states.h. Raises OSError and struct.error where the
    kernel does not tell, or not all.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        extensions = 1 << (attribute - 1) if attribute else 0
        ask = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, extensions, 1 << state) + bytes(48)
        yield from _answers(ask, port)


def _answers(ask: bytes, port: int) -> Iterator[TcpSocket]:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
    with contextlib.closing(link):
        link.settimeout(WAIT_S)
        size = HEADER_BYTES + len(ask)
        link.send(struct.pack("=IHHII", size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + ask)
        total = 0
        while total < MAX_BYTES:
            data = link.recv(1 << 16)
            total += len(data)
            ended, found = messages(data, port)
            yield from found
            if ended:
                return
    raise OSError(f"more than {MAX_BYTES >> 20} MiB of sockets")


def messages(data: bytes, port: int) -> tuple[bool, list[TcpSocket]]:
    """Return whether the list ends with this datagram, and its sockets at the local ``port``.

    Raises OSError and struct.error where the kernel does not tell.
    """
    found: list[TcpSocket] = []
    at = 0
    while at + HEADER_BYTES <= len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        body = data[at + HEADER_BYTES : at + size]
        if kind in (NLMSG_ERROR, NLMSG_DONE):
            # A list also ends with an error: a kernel without this list, for one.
            if (error := struct.unpack_from("=i", body)[0]) < 0:
                raise OSError(-error, os.strerror(-error))
            return True, found
        if struct.unpack_from("!H", body, PORT)[0] == port:
            (inode,) = struct.unpack_from("=I", body, INODE)
            found.append(TcpSocket(inode, _attributes(body[MESSAGE_BYTES:])))
        at += max(HEADER_BYTES, (size + 3) & ~3)
    return False, found


def _attributes(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        found[kind] = data[at + 4 : at + size]
        at += max(4, (size + 3) & ~3)
    return found
