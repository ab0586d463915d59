"""Requests that wait for the first byte of their answer, as the kernel knows them."""

import socket
import time

from plimsoll_sidecar.signals.tcp_sockets import count_unanswered_connections

LIMIT_S = 10.0
TICK_S = 0.02
"""Longer than the kernel's tick at any of its settings (HZ 100 to 1000)."""


def settles_at(port: int, count: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while count_unanswered_connections(port) != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_only_a_request_without_an_answer_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        served = [server.accept()[0] for _ in clients]
        assert count_unanswered_connections(port) == 0, "connections that are only open"
        clients[0].send(b"GET")
        clients[1].send(b"GET")
        assert settles_at(port, 2)
        served[0].send(b"200")
        assert settles_at(port, 1)
        time.sleep(TICK_S)
        clients[0].send(b"GET")
        assert settles_at(port, 2), "the second request of a connection"
        for one in (*clients, *served):
            one.close()
        assert settles_at(port, 0)
