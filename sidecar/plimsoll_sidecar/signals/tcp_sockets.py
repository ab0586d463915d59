"""TCP sockets of this network namespace: who listens, what is connected, what waits for an answer.

The kernel lists the sockets in some states (sock_diag(7)), which needs no permission. A read of
``/proc/net/tcp`` walks through the table of all connections, which takes milliseconds if that is
large, even for listeners alone.

The containers of a pod share the network, and with ``shareProcessNamespace`` the processes. File
descriptors are readable for processes of the same user only, and only where they have no more
capabilities than the reader.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plimsoll_sidecar.signals.process_table import MAX_DESCRIPTORS, first_names

LISTEN, ESTABLISHED = 10, 1
"""include/net/tcp_states.h"""
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLMSG_DONE = 20, 2, 3
REQUEST_DUMP = 0x301
WAIT_S = 0.5
MAX_BYTES = 4 << 20
HEADER_BYTES, MESSAGE_BYTES = 16, 72
"""``struct nlmsghdr`` and ``struct inet_diag_msg`` (include/uapi/linux)."""
PORT, INODE = 4, 68
"""Offsets in ``struct inet_diag_msg``: the local port in network order, and the inode."""
INET_DIAG_INFO = 2
LAST_SENT, LAST_RECEIVED, RECEIVED, SEGMENTS_SENT = 44, 52, 128, 156
"""Offsets in ``struct tcp_info`` (include/uapi/linux/tcp.h), which only ever grows at its end."""
MIN_INFO_BYTES = 160
MIN_WAIT_MS = 500
"""Most requests are answered sooner, and are counted by the engine anyway."""


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A socket. ``attributes`` are the kernel's, by number, as bytes."""

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
            # A list also ends with an error, for example from a kernel without this list.
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


def sockets(port: int, state: int) -> set[str]:
    """Inodes of this network's TCP sockets at the local ``port`` in ``state``."""
    try:
        return {str(one.inode) for one in tcp_sockets(port, state)}
    except (OSError, struct.error):
        return listed(port, state)


def listed(port: int, state: int) -> set[str]:
    """:func:`sockets` by the tables in /proc, for kernels and sandboxes without sock_diag."""
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                if len(fields) < 10 or int(fields[3], 16) != state:
                    continue
                if int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def holders(inodes: Iterable[str], pids: Iterable[int]) -> set[int]:
    """Those of ``pids`` that hold one of the sockets, as far as that may be seen."""
    links = {f"socket:[{inode}]" for inode in inodes}
    return {pid for pid in pids if _holds(pid, links)} if links else set()


def _holds(pid: int, links: set[str]) -> bool:
    try:
        names = first_names(f"/proc/{pid}/fd", MAX_DESCRIPTORS)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") in links:
                return True
        except OSError:
            continue
    return False


def unanswered(port: int) -> int | None:
    """Return how many connections wait at the local ``port`` for the first byte of their answer.

    They have waited for half a second or longer since data from the client. An idle connection says
    nothing, because load balancers keep them open. The kernel knows when data last came in and went
    out on each socket (``tcp_info``), to its tick of 1 to 10 ms: a request that follows an answer
    within one tick looks answered, and is not counted. None if the kernel does not tell.
    """
    try:
        return sum(
            _waits(one.attributes.get(INET_DIAG_INFO, b""))
            for one in tcp_sockets(port, ESTABLISHED, INET_DIAG_INFO)
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
