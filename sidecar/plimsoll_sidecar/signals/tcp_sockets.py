"""List TCP sockets of this network namespace: listeners, and connections that wait for an answer.

The kernel lists the sockets in given states without any permission (sock_diag(7)). Reading
``/proc/net/tcp`` would take milliseconds if the table of connections is large.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from plimsoll_sidecar.signals.process_table import MAX_DESCRIPTORS, list_entry_names

# include/net/tcp_states.h
TCP_LISTEN, TCP_ESTABLISHED = 10, 1
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLMSG_DONE = 20, 2, 3
# include/uapi/linux/netlink.h; together, they list all objects.
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NETLINK_TIMEOUT_S = 0.5
MAX_SOCKET_LIST_BYTES = 4 << 20
# The structs are in include/uapi/linux/netlink.h and inet_diag.h.
NETLINK_HEADER_BYTES, SOCKET_MESSAGE_BYTES = 16, 72
# These fields are in struct inet_diag_msg. The local port is in network byte order.
PORT_OFFSET, INODE_OFFSET = 4, 68
# The attribute that holds struct tcp_info.
INET_DIAG_INFO = 2
# These fields are in struct tcp_info (include/uapi/linux/tcp.h), which only grows at its end.
LAST_SENT_OFFSET, LAST_RECEIVED_OFFSET, BYTES_RECEIVED_OFFSET, SEGMENTS_SENT_OFFSET = (
    44,
    52,
    128,
    156,
)
# Up to the last field that is read.
MIN_TCP_INFO_BYTES = 160
# Most requests are answered sooner, and the engine counts them itself.
MIN_WAITING_MS = 500


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A TCP socket, with the raw values of netlink attributes by number."""

    inode: int
    attributes: dict[int, bytes]


def query_tcp_sockets(port: int, state: int, attribute: int = 0) -> Iterator[TcpSocket]:
    """Yield the sockets on the local ``port`` in ``state``, with one netlink ``attribute``.

    Raises OSError or struct.error if the kernel does not list the sockets completely.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        extensions = 1 << (attribute - 1) if attribute else 0
        request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, extensions, 1 << state) + bytes(
            48
        )
        yield from _query_kernel(request, port)


def _query_kernel(request: bytes, port: int) -> Iterator[TcpSocket]:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
    with contextlib.closing(link):
        link.settimeout(NETLINK_TIMEOUT_S)
        size = NETLINK_HEADER_BYTES + len(request)
        link.send(
            struct.pack("=IHHII", size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 1, 0)
            + request
        )
        total = 0
        while total < MAX_SOCKET_LIST_BYTES:
            data = link.recv(1 << 16)
            total += len(data)
            ended, sockets = parse_messages(data, port)
            yield from sockets
            if ended:
                return
    raise OSError(f"the kernel's list of sockets is larger than {MAX_SOCKET_LIST_BYTES >> 20} MiB")


def parse_messages(data: bytes, port: int) -> tuple[bool, list[TcpSocket]]:
    """Return whether the datagram ends the list, and its sockets on the local ``port``.

    Raises OSError or struct.error if the kernel reports an error.
    """
    sockets: list[TcpSocket] = []
    at = 0
    while at + NETLINK_HEADER_BYTES <= len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        body = data[at + NETLINK_HEADER_BYTES : at + size]
        if kind in (NLMSG_ERROR, NLMSG_DONE):
            # An error also ends a list, for example if the kernel does not support it.
            if (error := struct.unpack_from("=i", body)[0]) < 0:
                raise OSError(-error, os.strerror(-error))
            return True, sockets
        if struct.unpack_from("!H", body, PORT_OFFSET)[0] == port:
            (inode,) = struct.unpack_from("=I", body, INODE_OFFSET)
            sockets.append(TcpSocket(inode, _parse_attributes(body[SOCKET_MESSAGE_BYTES:])))
        at += max(NETLINK_HEADER_BYTES, (size + 3) & ~3)
    return False, sockets


def _parse_attributes(data: bytes) -> dict[int, bytes]:
    attributes: dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        attributes[kind] = data[at + 4 : at + size]
        at += max(4, (size + 3) & ~3)
    return attributes


def find_socket_inodes(port: int, state: int) -> set[str]:
    """Return the inodes of the TCP sockets on the local ``port`` in ``state``."""
    try:
        return {str(tcp_socket.inode) for tcp_socket in query_tcp_sockets(port, state)}
    except (OSError, struct.error):
        return find_socket_inodes_from_proc(port, state)


def find_socket_inodes_from_proc(port: int, state: int) -> set[str]:
    """Return the result of :func:`find_socket_inodes` on kernels without sock_diag."""
    return {inode for local, inode in _read_table("/proc/net", state) if local == port}


def find_listening_ports(pids: Sequence[int]) -> list[int]:
    """Return the ports on which any of ``pids`` listens, in the network of the first one."""
    rows = list(_read_table(f"/proc/{pids[0]}/net", TCP_LISTEN))
    return sorted({port for port, inode in rows if find_socket_owners([inode], pids)})


def _read_table(folder: str, state: int) -> Iterator[tuple[int, str]]:
    # Yields port and inode of each socket in this state.
    for table in (f"{folder}/tcp", f"{folder}/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                if len(fields) >= 10 and int(fields[3], 16) == state:
                    yield int(fields[1].rpartition(":")[2], 16), fields[9]


def find_socket_owners(inodes: Iterable[str], pids: Iterable[int]) -> set[int]:
    """Return those of ``pids`` that can be read and have one of the sockets open."""
    links = {f"socket:[{inode}]" for inode in inodes}
    return {pid for pid in pids if _has_any_socket_open(pid, links)} if links else set()


def _has_any_socket_open(pid: int, links: set[str]) -> bool:
    try:
        names = list_entry_names(f"/proc/{pid}/fd", MAX_DESCRIPTORS)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") in links:
                return True
        except OSError:
            continue
    return False


def count_unanswered_connections(port: int) -> int | None:
    """Return how many connections on the local ``port`` wait for the first byte of an answer.

    None if the kernel does not report it. A connection counts :data:`MIN_WAITING_MS` after the
    client last sent data.
    """
    try:
        return sum(
            _is_waiting_for_answer(tcp_socket.attributes.get(INET_DIAG_INFO, b""))
            for tcp_socket in query_tcp_sockets(port, TCP_ESTABLISHED, INET_DIAG_INFO)
        )
    except (OSError, struct.error):
        return None


def _is_waiting_for_answer(info: bytes) -> bool:
    # Idle connections, which load balancers keep open, do not count. A request that follows an
    # answer within one tick of the kernel (1 to 10 ms) seems to be answered.
    if len(info) < MIN_TCP_INFO_BYTES:
        return False
    sent_ms, received_ms = (_read_u32(info, at) for at in (LAST_SENT_OFFSET, LAST_RECEIVED_OFFSET))
    (received,) = struct.unpack_from("=Q", info, BYTES_RECEIVED_OFFSET)
    if not received or received_ms < MIN_WAITING_MS:
        return False
    return _read_u32(info, SEGMENTS_SENT_OFFSET) == 0 or received_ms < sent_ms


def _read_u32(data: bytes, offset: int) -> int:
    value: int = struct.unpack_from("=I", data, offset)[0]
    return value
