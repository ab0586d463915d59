"""The HTTP server alone, on real sockets: each client that keeps it waiting has an end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plimsoll_engine import server
from plimsoll_engine.api.answer import encode_error_body, refuse_connection
from plimsoll_engine.api.body import BodyReader, BodyRefusedError
from plimsoll_engine.http import connection
from plimsoll_engine.http.budget import BodyBudget
from plimsoll_engine.http.connection import Connection
from plimsoll_engine.http.connections import Connections
from plimsoll_engine.http.limits import HttpLimits

LIMITS = HttpLimits(
    max_connections=16, idle_timeout_s=1, header_timeout_s=1, body_timeout_s=1, write_timeout_s=3
)
MOST = 1 << 20
PIECES, PIECE = 200, 1 << 16
Port = int


class App:
    """Reads a body and tells its length; ``/stream`` answers with 12 MiB; ``/wait`` waits."""

    def __init__(self) -> None:
        self.budget = BodyBudget(lambda: 2 * MOST, LIMITS.max_connections)
        self._reader = BodyReader(LIMITS, self.budget)
        self.go_on = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(PIECES):
                part = {"type": "http.response.body", "body": b"x" * PIECE, "more_body": True}
                await send(part)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if scope["path"] == "/wait":
            await asyncio.to_thread(self.go_on.wait, 60)
        try:
            async with self._reader.read(Request(scope, receive), MOST) as body:
                response = Response(str(len(body.raw)))
        except BodyRefusedError as error:
            response = Response(
                encode_error_body(error.status, str(error), error.code), error.status
            )
        await response(scope, receive, send)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Port, Connections, App]]:
    monkeypatch.setattr(connection, "LINGER_TIMEOUT_S", 1.0)
    connections, app = Connections(LIMITS, refuse_connection, encode_error_body), App()
    listener = server._open_listening_socket("127.0.0.1", 0, "--port")
    http = server._create_http_server(app, connections)
    thread = threading.Thread(target=lambda: uvloop.run(http.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()[1], connections, app
    finally:
        app.go_on.set()
        http.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def client(port: Port, sent: bytes, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as one:
        if receive_buffer is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        one.settimeout(30)
        one.connect(("127.0.0.1", port))
        one.sendall(sent)
        yield one


def post(length: int, body: bytes = b"", path: str = "/", extra: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{extra}Content-Length: {length}\r\n\r\n"
    return head.encode() + body


def all_of(one: socket.socket) -> bytes:
    """Until the server closes."""
    seen = b""
    while piece := one.recv(1 << 16):
        seen += piece
    return seen


def status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


HIDDEN = b"0\r\n\r\nGET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            f"Content-Length: {len(HIDDEN)}\r\nTransfer-Encoding: chunked",
            "both Transfer-Encoding and Content-Length", id="length-and-coding",
        ),
        pytest.param(
            f"transfer-encoding: chunked\r\ncontent-length: {len(HIDDEN)}",
            "both Transfer-Encoding and Content-Length", id="coding-and-length",
        ),
        pytest.param(
            f"Content-Length: 0\r\nContent-Length: {len(HIDDEN)}",
            "conflicting Content-Length", id="two-lengths",
        ),
        pytest.param(
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            "the request is not valid HTTP", id="two-codings",
        ),
    ],
)  # fmt: skip
def test_an_ambiguous_length_is_refused_and_nothing_after_it_answered(
    served: tuple[Port, Connections, App], fields: str, message: str
) -> None:
    port, connections, _ = served
    sent = f"POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n\r\n".encode() + HIDDEN
    with client(port, sent) as one:
        answer = all_of(one)
    assert status_and_code(answer) == (400, "invalid_http")
    assert message in answer.decode()
    assert answer.count(b"HTTP/1.1 ") == 1
    until(lambda: len(connections) == 0)


@pytest.mark.parametrize("sent", [b"", b"GET /", post(2, b"ab"), b"nonsense\r\n\r\n"])
def test_a_closed_connection_leaves_no_reference_cycle(
    served: tuple[Port, Connections, App], sent: bytes
) -> None:
    port, connections, _ = served
    gc.collect()
    gc.disable()
    try:
        with client(port, sent) as one:
            if sent.endswith((b"b", b"\n")):
                one.recv(1)
        until(lambda: not len(connections))
        until(lambda: not any(type(one) is Connection for one in gc.get_objects()))
    finally:
        gc.enable()


def test_requests_in_a_row_are_each_answered(served: tuple[Port, Connections, App]) -> None:
    """Pipelining is legal, also after a body in chunks."""
    port, _, _ = served
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked = head + b"1\r\nx\r\n0\r\n\r\n"
    with client(port, chunked + post(2, b"ab") + post(3, b"abc", extra=CLOSE)) as one:
        answer = all_of(one)
    assert answer.count(b"HTTP/1.1 200 ") == 3


CLOSE = "Connection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        pytest.param(b"POST / HT", 408, "header_timeout", id="half-a-header"),
        pytest.param(post(30, b"a"), 408, "body_timeout", id="half-a-body"),
        pytest.param(post(5 << 20, b"x" * (5 << 20)), 413, "body_too_large", id="large"),
        pytest.param(
            post(5 << 20, b"x" * (5 << 20), extra=CLOSE), 413, "body_too_large", id="large-closes"
        ),
        pytest.param(b"\0\1\2\r\n\r\n", 400, "invalid_http", id="garbage"),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            400, "invalid_http", id="no-chunk",
        ),
    ],
)  # fmt: skip
def test_a_client_gets_the_reason(
    served: tuple[Port, Connections, App], sent: bytes, status: int, code: str
) -> None:
    port, connections, app = served
    with client(port, sent) as one:
        assert status_and_code(all_of(one)) == (status, code)
    until(lambda: len(connections) == 0)
    assert app.budget.held_bytes == 0


def test_a_silent_connection_is_closed_and_a_kept_one_too(
    served: tuple[Port, Connections, App],
) -> None:
    port, connections, _ = served
    with client(port, b"") as silent, client(port, post(3, b"abc")) as kept:
        assert all_of(silent) == b""
        assert all_of(kept).endswith(b"\r\n\r\n3")
    assert connections.closed["header_timeout"] == 1


def test_who_takes_nothing_is_cut_and_who_takes_little_is_not(
    served: tuple[Port, Connections, App],
) -> None:
    port, connections, _ = served
    asked = b"GET /stream HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with client(port, asked, 4096) as stuck, client(port, asked, 1 << 16) as slow:
        size, begun = 0, time.monotonic()
        while piece := slow.recv(1 << 16):
            size += len(piece)
            time.sleep(0.01)  # slow and steady is what is tried
        assert size >= PIECES * PIECE
        assert time.monotonic() - begun > 1
        until(lambda: connections.closed["write_timeout"] == 1)
        with contextlib.suppress(ConnectionError):
            assert len(all_of(stuck)) < PIECES * PIECE
    until(lambda: len(connections) == 0 and connections.unsent_bytes == 0)


def test_waiting_connections_make_room_and_working_ones_do_not(
    served: tuple[Port, Connections, App],
) -> None:
    port, connections, app = served
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(client(port, b""))
        with client(port, post(3, b"abc", extra=CLOSE)) as one:
            assert all_of(one).endswith(b"3")
        assert connections.closed["evicted"] >= 80
        assert connections.closed["refused"] == 0
        working = [stack.enter_context(client(port, post(1, b"a", "/wait"))) for _ in range(16)]
        until(lambda: sum(c.is_answering for c in list(connections._open)) == 16)
        with client(port, post(3, b"abc")) as one:
            assert status_and_code(all_of(one)) == (503, "too_many_connections")
        app.go_on.set()
        assert all(one.recv(12) == b"HTTP/1.1 200" for one in working)


def test_requests_on_top_of_one_in_work_are_not_kept(
    served: tuple[Port, Connections, App],
) -> None:
    port, connections, _ = served
    with client(port, post(1, b"a", "/wait")) as one:
        until(lambda: any(c.is_answering for c in list(connections._open)))
        with contextlib.suppress(ConnectionError):
            one.sendall(b"x" * (1 << 20))
            all_of(one)
    assert connections.closed["pipelined"] == 1
