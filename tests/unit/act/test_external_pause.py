"""Whether a server says that it is paused, and how often it is asked.

Tests ``act/adapters/external_load.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from plimsoll_sidecar.act.adapters import external_load
from plimsoll_sidecar.act.adapters.external_load import (
    RETRY_INTERVAL_S,
    STALLED_SCRAPE_INTERVAL_S,
    ExternalLoad,
    PauseReader,
)
from plimsoll_sidecar.act.adapters.external_profile import SGLANG, VLLM
from plimsoll_sidecar.clients.http import HttpClient

PAGE = b"vllm:num_requests_running 2.0\nvllm:iteration_tokens_total_count %d\n"


class Server:
    """Answers ``/is_paused`` with ``answer``, and ``/metrics`` with ``steps``, over real HTTP."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = (200, b'{"is_paused": true}')
        self.steps = 7
        self.asked = 0
        self.hangs = threading.Event()
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = 200, PAGE % outer.steps
                if self.path == "/load":
                    status, body = 404, b""
                if self.path == "/is_paused":
                    outer.asked += 1
                    if outer.hangs.is_set():
                        outer.released.wait(30)
                    status, body = outer.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.client = HttpClient(f"http://127.0.0.1:{self.http.server_address[1]}")
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_answer_is_read_each_time(server: Server) -> None:
    reader = PauseReader(server.client, "/is_paused", Clock())
    assert reader.read() is True
    server.answer = 200, b'{"is_paused": false, "later": 1}'
    assert reader.read() is False
    assert server.asked == 2


def test_a_server_without_the_route_is_asked_once_an_epoch(server: Server) -> None:
    """VLLM has it in its development mode alone."""
    clock = Clock()
    reader = PauseReader(server.client, "/is_paused", clock)
    server.answer = 404, b'{"detail":"Not Found"}'
    for _ in range(3):
        assert reader.read() is None
        clock.now += 10 * RETRY_INTERVAL_S
    assert server.asked == 1
    server.answer = 200, b'{"is_paused": true}'
    assert reader.read() is None
    reader.reset()
    assert reader.read() is True


@pytest.mark.parametrize(
    "answer",
    [(500, b'{"error": "x"}'), (401, b""), (200, b""), (200, b'{"is_paused": "yes"}'),
     (200, b'{"is_paused": 1}'), (200, b"\xff"), (200, b"[" * 5000), (500, b'{"is_paused": true}')],
)  # fmt: skip
def test_what_is_no_answer_is_unknown_and_seldom_asked_for(
    server: Server, answer: tuple[int, bytes]
) -> None:
    clock = Clock()
    reader = PauseReader(server.client, "/is_paused", clock)
    server.answer = answer
    assert reader.read() is None
    assert reader.read() is None
    assert server.asked == 1
    clock.now += RETRY_INTERVAL_S
    server.answer = 200, b'{"is_paused": true}'
    assert reader.read() is True


def test_a_server_that_hangs_is_not_waited_for_again_and_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_load, "PAUSE_TIMEOUT_S", 0.1)
    server.hangs.set()
    reader = PauseReader(server.client, "/is_paused", Clock())
    assert [reader.read() for _ in range(5)] == [None] * 5
    assert server.asked == 1


def test_an_engine_that_no_path_is_known_of_is_not_asked(server: Server) -> None:
    assert PauseReader(server.client, SGLANG.paused_path, Clock()).read() is None
    assert server.asked == 0


def test_only_an_engine_with_work_that_makes_no_step_is_asked(server: Server) -> None:
    clock = Clock()
    load = ExternalLoad(server.client, VLLM, clock)

    def page() -> bool | None:
        clock.now += 2 * STALLED_SCRAPE_INTERVAL_S
        newest = load.get_newest_load()
        assert newest is not None
        return newest[0].paused

    assert page() is None
    server.steps += 1
    assert page() is None
    assert server.asked == 0
    assert page() is True
    server.answer = 200, b'{"is_paused": false}'
    assert page() is False
    assert server.asked == 2
    server.steps += 1
    assert page() is None
