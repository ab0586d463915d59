"""The bounds on an answer, against servers that break each of them."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from plimsoll_sidecar.clients.http import (
    MAX_BODY_BYTES,
    EngineError,
    HttpClient,
    RequestError,
    create_pool,
    request,
)
from tests.unit.clients.raw_server import Send, ok, serve

HEAD = b"HTTP/1.1 200 OK\r\n"
TIMEOUT_S = 0.6
MARGIN_S = 3.0
"""For a busy machine: without the bound none of these calls would end within a minute."""


def dripping(first: bytes, byte: bytes = b"a", pause_s: float = 0.1) -> Send:
    """Send ``first``, then a byte now and then: each soon enough for a timeout of one read."""

    def send(peer: socket.socket) -> None:
        peer.sendall(first)
        for _ in range(600):
            peer.sendall(byte)
            time.sleep(pause_s)

    return send


@pytest.mark.parametrize(
    "send",
    [
        dripping(b""),
        dripping(HEAD + b"X: "),
        dripping(HEAD, b"X: y\r\n"),
        dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n"),
        dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"T: y\r\n"),
        dripping(HEAD + b"Content-Length: 1000\r\n\r\n"),
        dripping(HEAD + b"\r\n"),
    ],
    ids=["status", "header", "headers", "continue", "chunk", "trailer", "length", "close"],
)
def test_a_byte_now_and_then_does_not_hold_the_caller(send: Send) -> None:
    with serve(send) as url:
        begin = time.monotonic()
        with pytest.raises(EngineError, match="was not complete within the timeout"):
            HttpClient(url).call("GET", "/health", TIMEOUT_S)
        assert time.monotonic() - begin < TIMEOUT_S + MARGIN_S


def test_the_head_alone_is_asked_for_and_is_bounded_too() -> None:
    with serve(dripping(HEAD + b"Content-Length: 9\r\n\r\n", pause_s=5)) as url:
        assert HttpClient(url).responds_to_get("/health", TIMEOUT_S + MARGIN_S)
    with serve(dripping(HEAD + b"X: ")) as url:
        assert not HttpClient(url).responds_to_get("/health", TIMEOUT_S)


def endless(first: bytes, rest: bytes) -> Send:
    def send(peer: socket.socket) -> None:
        peer.sendall(first)
        for _ in range((64 << 20) // len(rest)):
            peer.sendall(rest)

    return send


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (endless(HEAD, b"X-Long: " + b"a" * 60_000 + b"\r\n"), "larger than the limit"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), "larger than the limit"),
        (endless(HEAD + b"\r\n", b"a" * 65_536), "larger than 4 MiB"),
        (endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 60_000), "."),
    ],
    ids=["headers", "continue", "body", "extension"],
)
def test_an_answer_without_end_takes_bounded_memory(send: Send, message: str) -> None:
    with serve(send) as url:
        tracemalloc.start()
        try:
            with pytest.raises(EngineError, match=message):
                HttpClient(url).call("GET", "/metrics", 10.0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 4 * MAX_BODY_BYTES


def test_a_compressed_body_is_not_unpacked() -> None:
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n"
    with serve(head + b"\x1f\x8b\x08\x00") as url:
        assert HttpClient(url).call("GET", "/metrics", 5.0) == (200, b"\x1f\x8b\x08\x00")


def test_a_caller_may_take_less() -> None:
    with serve(ok(b"a" * 1025)) as url:
        with pytest.raises(EngineError, match="larger than"):
            HttpClient(url).call("GET", "/state", 5.0, max_bytes=1024)
        assert HttpClient(url).call("GET", "/state", 5.0, max_bytes=1025)[0] == 200


@pytest.fixture
def counting() -> Iterator[tuple[str, list[int]]]:
    """A server that keeps connections open, and the requests that each had."""
    listener, counts = socket.create_server(("127.0.0.1", 0)), list[int]()

    def run() -> None:
        peer, _ = listener.accept()
        with peer:
            counts.append(0)
            while peer.recv(1 << 16):
                counts[-1] += 1
                peer.sendall(HEAD + b"Content-Length: 2\r\n\r\nok")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", counts
    listener.close()
    thread.join(5)


def test_a_connection_that_is_kept_has_the_bounds_anew(counting: tuple[str, list[int]]) -> None:
    url, counts = counting
    with create_pool(maxsize=2) as connections:
        for _ in range(3):
            assert request(connections, "GET", url + "/", 5.0).body == b"ok"
            time.sleep(0.05)
    assert counts == [3]


def test_nothing_that_listens_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
    with create_pool() as connections, pytest.raises(RequestError):
        request(connections, "GET", url, 2.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000/"])
def test_a_plain_connection_gets_no_option_of_tls(url: str) -> None:
    # urllib3 2.2, which the package allows, refuses assert_hostname there with a TypeError.
    assert "assert_hostname" not in HttpClient(url)._create_pool().connection_pool_kw


def test_the_name_in_a_certificate_is_not_compared() -> None:
    options = HttpClient("https://127.0.0.1:8000")._create_pool().connection_pool_kw
    assert options["assert_hostname"] is False
