"""Who listens at a port: by sock_diag, or by /proc on kernels without it.

Tests ``signals/tcp_sockets.py``.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from plimsoll_sidecar.signals import tcp_sockets as sock_diag
from plimsoll_sidecar.signals.tcp_sockets import (
    TCP_ESTABLISHED,
    TCP_LISTEN,
    find_socket_inodes,
    find_socket_inodes_from_proc,
)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port_of(one: socket.socket) -> int:
    return int(one.getsockname()[1])


def inode(one: socket.socket) -> str:
    return str(os.fstat(one.fileno()).st_ino)


@pytest.mark.parametrize("look", [find_socket_inodes, find_socket_inodes_from_proc])
def test_listeners_and_connections_are_told_apart(server: socket.socket, look: object) -> None:
    assert callable(look)
    port = port_of(server)
    with (
        socket.create_server(("::1", port), family=socket.AF_INET6) as other,
        socket.create_connection(("127.0.0.1", port)),
        server.accept()[0] as accepted,
    ):
        assert look(port, TCP_LISTEN) == {inode(server), inode(other)}
        assert look(port, TCP_ESTABLISHED) == {inode(accepted)}, "the client's port is another"


def test_the_ports_of_a_process_are_those_that_it_listens_at(server: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server))) as client:
        ports = sock_diag.find_listening_ports([os.getpid()])
        assert port_of(server) in ports
        assert port_of(client) not in ports
    assert sock_diag.find_listening_ports([1, os.getppid()]).count(port_of(server)) == 0


def test_without_sock_diag_the_tables_are_read(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = socket.socket

    def refuse(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_NETLINK:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return made(family, *rest)

    monkeypatch.setattr(socket, "socket", refuse)
    assert find_socket_inodes(port_of(server), TCP_LISTEN) == {inode(server)}


@pytest.mark.parametrize("kind", [sock_diag.NLMSG_DONE, sock_diag.NLMSG_ERROR])
def test_a_list_that_ends_with_an_error_is_unknown_and_not_empty(kind: int) -> None:
    body = struct.pack("=i", -errno.ENOENT)
    message = struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body
    with pytest.raises(FileNotFoundError):
        sock_diag.parse_messages(message, 80)
    body = struct.pack("=i", 0)
    message = struct.pack("=IHHII", 16 + len(body), sock_diag.NLMSG_DONE, 0, 1, 0) + body
    assert sock_diag.parse_messages(message, 80) == (True, [])


def test_half_a_message_is_an_error() -> None:
    with pytest.raises(struct.error):
        sock_diag.parse_messages(struct.pack("=IHHII", 40, 20, 0, 1, 0) + bytes(2), 80)
