"""Clients that keep the engine waiting or send more than it can use: each has its bound, and the
streams of others go on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.engine.conftest import Engine

MODEL = "tiny"
MIB = 1 << 20
BLOCK_MAX_S = 0.05
"""Of the event loop; in CPU time, since the wall-clock time of a test is its neighbours', too."""


def head(length: int, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Length: {length}\r\n\r\n".encode()


def request(body: bytes, path: str = "/v1/completions") -> bytes:
    return head(len(body), path) + body


def connect(engine: Any, receive_buffer: int | None = None) -> socket.socket:
    host, port = engine.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(60)
    client.connect((host, int(port)))
    return client


@contextlib.contextmanager
def connections(engine: Any, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(engine)) for _ in range(count)]
        for client in clients:
            client.sendall(sent)
        yield clients


def answer(client: socket.socket) -> tuple[int, str]:
    """Status and code of the error that the server closes or goes on with."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"}}" not in data and (piece := client.recv(65536)):
            data += piece
    if not data:
        return 0, ""
    top, _, body = data.partition(b"\r\n\r\n")
    return int(top.split()[1]), str(json.loads(body)["error"]["code"])


def owner(engine: Any, name: str) -> dict[str, Any]:
    return next(one for one in engine.status()["ledger"] if one["owner"] == name)


def closed(engine: Any, reason: str, server: str = "serving") -> float:
    label = f'{{reason="{reason}",server="{server}"}}'
    found = re.search(
        rf"^plimsoll_engine_http_connections_closed_total{re.escape(label)} (\S+)$",
        engine.get("/metrics", 30.0)[1],
        re.MULTILINE,
    )
    assert found is not None, label
    return float(found[1])


def longest_block_s(engine: Any) -> float:
    text = engine.get("/metrics", 30.0)[1]
    found = re.search(
        r'^plimsoll_engine_event_loop_block_max_seconds\{clock="cpu".*\} (\S+)$', text, re.MULTILINE
    )
    assert found is not None
    return float(found[1])


@pytest.fixture(scope="module")
def strict(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with little patience."""
    one = Engine(
        tiny, tmp_path_factory.mktemp("strict"), "--max-connections=48", "--header-timeout=3",
        "--body-timeout=5", "--write-timeout=6", "--max-body-bytes=4Mi", "--body-buffer-bytes=16Mi",
    )  # fmt: skip
    try:
        yield one.wait_ready()
    finally:
        one.end()


def test_unfinished_bodies_take_no_more_than_their_bound(strict: Engine) -> None:
    engine = strict
    frontend = psutil.Process(engine.process.pid)
    before = frontend.memory_info().rss
    with engine.streams(2, 400) as streams, connections(engine, 30, head(4 * MIB)) as clients:
        # One client has half of 16 MiB: two bodies of 4 MiB. All others learn it at once.
        with ThreadPoolExecutor(30) as pool:
            answers = list(pool.map(answer, clients[2:]))
        assert answers == [(429, "too_many_bytes")] * 28
        for client in clients[:2]:
            client.sendall(b" " * (4 * MIB - 1))
        engine.until(lambda: owner(engine, "http_bodies")["bytes"] > 7 * MIB, "two bodies", 60.0)
        held = owner(engine, "http_bodies")
        assert held["bytes"] <= held["bound"]
        assert frontend.memory_info().rss - before < 40 * MIB
        small = engine.client.completions.create(model=MODEL, prompt="Hull", max_tokens=2)
        assert small.usage is not None
        assert small.usage.completion_tokens == 2
    engine.until(lambda: owner(engine, "http_bodies")["bytes"] == 0, "an end")
    assert [stream.result(60).finish_reason for stream in streams] == ["length"] * 2
    engine.clean()


def test_a_stalled_body_gets_408_and_a_slow_one_is_read(strict: Engine) -> None:
    engine = strict
    body = json.dumps({"model": MODEL, "prompt": "Hull", "max_tokens": 1}).encode()
    with connections(engine, 2) as (stops, moves):
        stops.sendall(head(100))
        moves.sendall(head(len(body)))
        for at in range(len(body)):
            moves.sendall(body[at : at + 1])
        assert moves.recv(65536).startswith(b"HTTP/1.1 200")
        assert answer(stops) == (408, "body_timeout")
    engine.clean()


def test_an_error_before_the_end_of_a_body_arrives(engine: Any) -> None:
    """Also where the client asks to close the connection, as urllib does: no reset overtakes it."""
    for _ in range(3):
        status, body = engine.post("/v1/completions", b" " * (20 * MIB))
        assert (status, body["error"]["code"]) == (413, "body_too_large")
    engine.clean()


def test_idle_and_slow_connections_end_and_make_room(strict: Engine) -> None:
    engine = strict
    with (
        engine.streams(2, 400) as streams,
        connections(engine, 20, b"POST /v1/completions HTTP/1.1\r\nHost:") as slow,
    ):
        assert {answer(client) for client in slow} == {(408, "header_timeout")}
        with connections(engine, 200):
            # No connection is free: those that wait longest for nothing made room.
            assert engine.get("/health", 20.0)[0] == 200
            assert closed(engine, "evicted") >= 100
        with connections(engine, 20) as idle:
            assert {client.recv(1) for client in idle} == {b""}
    assert [stream.result(60).finish_reason for stream in streams] == ["length"] * 2
    assert closed(engine, "header_timeout") >= 40
    engine.clean()


def test_more_connections_at_work_than_the_bound_are_refused(strict: Engine) -> None:
    engine, worker = strict, strict.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    try:
        with connections(engine, 48, request(completion("Hull", stream=True))):
            engine.until(lambda: engine.status()["load"]["inflight"] == 48, "48 at work", 60.0)
            status, body = engine.get("/health", 20.0)
            assert status == 503
            assert json.loads(body)["error"]["code"] == "too_many_connections"
    finally:
        os.kill(worker, signal.SIGCONT)
    engine.until(lambda: engine.get("/health", 20.0)[0] == 200, "room", 60.0)
    engine.until(lambda: engine.status()["load"]["inflight"] == 0, "an end", 60.0)
    engine.clean()


def test_the_admin_port_ends_idle_and_slow_connections(strict: Engine) -> None:
    engine = strict
    ports = engine.ports()
    assert ports is not None
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", ports[1]), 30))
            for _ in range(200)
        ]
        assert engine.admin("GET", "/status", timeout_s=30.0)[0] == 200
        clients[-1].sendall(b"GET /admin/v1/status HTTP/1.1\r\n")
        seen = b""
        while piece := clients[-1].recv(4096):
            seen += piece
        assert seen.startswith(b"HTTP/1.1 408")
        assert json.loads(seen.partition(b"\r\n\r\n")[2])["code"] == "HeaderTimeout"
    assert closed(engine, "evicted", "admin") >= 100


def test_who_reads_nothing_is_cut_and_who_reads_slowly_is_not(strict: Engine) -> None:
    """Answers of some 2 MB: more than the kernel takes for a client that reads nothing."""
    engine, cut = strict, closed(strict, "write_timeout")
    asked = request(completion("Hull", n=16, max_tokens=600, stream=True, ignore_eos=True))
    with connect(engine, 16 << 10) as stuck, connect(engine, 64 << 10) as slow:
        slow.sendall(asked)
        slow_end = b""
        engine.until(lambda: engine.status()["load"]["inflight"] == 16, "the slow one")
        stuck.sendall(asked)
        engine.until(lambda: engine.status()["load"]["inflight"] > 16, "the stuck one")
        deadline = time.monotonic() + 200
        while not slow_end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            assert time.monotonic() < deadline
            piece = slow.recv(64 << 10)
            assert piece, "cut"
            slow_end = (slow_end + piece)[-100:]
            time.sleep(0.1)  # slow and steady is what is tried here, no wait for something
        engine.until(lambda: engine.status()["load"]["inflight"] == 0, "an end", 60.0)
        assert closed(engine, "write_timeout") == cut + 1
    engine.until(lambda: owner(engine, "http_answers")["bytes"] == 0, "buffers given back")
    engine.clean()


def completion(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 1, "prompt": prompt} | fields).encode()


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "a"}]
    return json.dumps({"model": MODEL, "max_tokens": 1, "messages": messages, **fields}).encode()


def tool(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "a", "parameters": parameters}}]


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Made by the test: to make them all takes a second, in every worker that collects tests.
ABUSE: dict[str, tuple[str, Callable[[], bytes], int, str | None]] = {
    "empty-prompts-of-30-MB": (
        COMPLETIONS, lambda: completion([[]] * 7_500_000), 413, "body_too_large"
    ),
    "empty-prompts": (COMPLETIONS, lambda: completion([[]] * 45_000), 400, "invalid_value"),
    "more-values-than-read": (
        COMPLETIONS, lambda: completion([[]] * 200_000), 413, "body_too_complex"
    ),
    "many-prompts": (COMPLETIONS, lambda: completion(["a"] * 1000), 400, "invalid_value"),
    "half-a-megabyte": (
        COMPLETIONS, lambda: completion("tide " * 100_000), 400, "context_length_exceeded"
    ),
    "variables-of-23-MB": (
        CHAT, lambda: chat(chat_template_kwargs={"a": "x" * 23_000_000}), 413, "body_too_large"
    ),
    "variables": (CHAT, lambda: chat(chat_template_kwargs={"a": [[]] * 40_000}), 200, None),
    "a-schema": (CHAT, lambda: chat(tools=tool({str(n): {} for n in range(30_000)})), 200, None),
    "many-messages": (
        CHAT, lambda: chat(messages=[{"role": "user", "content": ""}] * 5000), 400, "invalid_value"
    ),
    "tokenize": (
        "/tokenize",
        lambda: json.dumps({"prompt": "tide " * 60_000, "return_token_strs": True}).encode(),
        200, None,
    ),
    "detokenize": (
        "/detokenize", lambda: json.dumps({"tokens": [5] * 90_000}).encode(),
        400, "context_length_exceeded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ABUSE)
def test_no_body_holds_up_the_loop(engine: Any, case: str) -> None:
    path, make, status, code = ABUSE[case]
    body = make()
    with engine.streams(2, 60) as streams:
        answered, told = engine.post(path, body)
    assert answered == status, told
    if code is not None:
        assert told["error"]["code"] == code, told
    assert [stream.result(60).finish_reason for stream in streams] == ["length"] * 2
    assert longest_block_s(engine) <= BLOCK_MAX_S
    engine.clean()


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
FRAMING = {
    "header": b"GET /version HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 50_000 + b"\r\n",
    "chunks": CHUNKED + b"1\r\nx\r\n" * 100_000,
    "trailers": CHUNKED + b"0\r\n" + b"a:b\r\n" * 50_000 + b"\r\n",
}


@pytest.mark.parametrize("case", FRAMING)
def test_no_framing_holds_up_the_loop(engine: Any, case: str) -> None:
    with connect(engine) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(FRAMING[case])
        # The rest of what was sent may reset the connection before the answer is read.
        assert answer(client) in ((400, "invalid_http"), (0, ""))
    assert longest_block_s(engine) <= BLOCK_MAX_S
    engine.clean()
