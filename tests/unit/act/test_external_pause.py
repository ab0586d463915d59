"""Whether a server says that it is paused, and how often it is asked.

Tests ``act/adapters/optional_paths.py`` and its use in ``act/adapters/external_load.py``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import cast

import pytest

from plimsoll_api.decoding import MalformedError
from plimsoll_api.trace import Host, Sample
from plimsoll_sidecar.act.adapters import optional_paths
from plimsoll_sidecar.act.adapters.external_load import STALLED_SCRAPE_INTERVAL_S, ExternalLoad
from plimsoll_sidecar.act.adapters.external_profile import SGLANG, VLLM
from plimsoll_sidecar.act.adapters.optional_paths import (
    MAX_QUEUES_AGE_S,
    RETRY_INTERVAL_S,
    OptionalReader,
    parse_pause,
    parse_transfers,
)
from plimsoll_sidecar.clients.http import HttpClient
from plimsoll_sidecar.detect.stall import StallWatch
from tests.http_server import Handler

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

        class Engine(Handler):
            def do_GET(self) -> None:
                status, body = 200, PAGE % outer.steps
                if self.path == "/load":
                    status, body = 404, b""
                if self.path == "/is_paused":
                    outer.asked += 1
                    if outer.hangs.is_set():
                        outer.released.wait(30)
                    status, body = outer.answer
                self.answer(status, body)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
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
    reader = OptionalReader(server.client, "/is_paused", parse_pause, Clock())
    assert reader.read() is True
    server.answer = 200, b'{"is_paused": false, "later": 1}'
    assert reader.read() is False
    assert server.asked == 2


def test_a_server_without_the_route_is_asked_once_an_epoch(server: Server) -> None:
    """VLLM has it in its development mode alone."""
    clock = Clock()
    reader = OptionalReader(server.client, "/is_paused", parse_pause, clock)
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
    reader = OptionalReader(server.client, "/is_paused", parse_pause, clock)
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
    monkeypatch.setattr(optional_paths, "REQUEST_TIMEOUT_S", 0.1)
    server.hangs.set()
    reader = OptionalReader(server.client, "/is_paused", parse_pause, Clock())
    assert [reader.read() for _ in range(5)] == [None] * 5
    assert server.asked == 1


def test_an_engine_that_no_path_is_known_of_is_not_asked(server: Server) -> None:
    assert OptionalReader(server.client, SGLANG.paused_path, parse_pause, Clock()).read() is None
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


def test_requests_that_wait_for_another_sglang_are_deferred_while_its_scheduler_lives() -> None:
    """Its page keeps the queues of the last step, so a decode engine whose prefill engine hung
    seemed to have stalled, and was restarted."""
    now = time.time()

    def answer(*ranks: tuple[float, int]) -> bytes:
        loads = [
            {
                "dp_rank": number,
                "timestamp": now - age,
                "num_running_reqs": 0,
                "disaggregation": {
                    "mode": "decode",
                    "prefill_bootstrap_queue_reqs": 0,
                    "decode_prealloc_queue_reqs": 1,
                    "decode_transfer_queue_reqs": queued,
                    "kv_transfer_speed_gb_s": 0.0,
                },
            }
            for number, (age, queued) in enumerate(ranks)
        ]
        return json.dumps({"version": "0.5.23", "loads": loads}).encode()

    assert parse_transfers(answer((0.1, 2), (1.0, 0))) == 4
    assert parse_transfers(answer((2 * MAX_QUEUES_AGE_S, 2), (1.0, 0))) == 1
    for malformed in (b"{}", b"[]", b'{"loads": [{}]}', answer((0.1, 2)).replace(b"2", b"[")):
        with pytest.raises(MalformedError):
            parse_transfers(malformed)


class Sglang:
    """A decode engine that serves for five minutes, and then only waits for its prefill engine."""

    def __init__(self, clock: Clock, age_s: float) -> None:
        self.clock, self.age_s = clock, age_s
        self.asked: list[float] = []

    @property
    def waiting(self) -> int:
        return 3 if self.clock.now > 310 else 0

    def call(self, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        now, serves = self.clock.now, self.clock.now < 300
        if path == "/metrics":
            active = 1 if serves else self.waiting
            page = f"sglang:num_running_reqs {int(serves)}\nsglang:num_queue_reqs 0\n"
            page += f"sglang:cuda_graph_passes_total {50 * min(now, 300):.0f}\n"
            page += f'sglang:http_requests_active{{endpoint="/v1/completions"}} {active}\n'
            return 200, page.encode()
        assert path == "/v1/loads?include=disagg"
        self.asked.append(now)
        queues = {"decode_transfer_queue_reqs": self.waiting}
        load = {"timestamp": time.time() - self.age_s, "disaggregation": queues}
        return 200, json.dumps({"loads": [load]}).encode()


@pytest.mark.parametrize("hangs", [False, True])
def test_sglang_waits_for_another_engine_without_a_stall_while_its_scheduler_lives(
    hangs: bool,
) -> None:
    clock, watch, cpu_s = Clock(), StallWatch(120.0, 1.0), 0.0
    server = Sglang(clock, 2 * MAX_QUEUES_AGE_S if hangs else 0.1)
    load = ExternalLoad(cast(HttpClient, server), SGLANG, clock)
    stalls = []
    for second in range(420):
        clock.now, cpu_s = float(second), cpu_s + (0.5 if second < 300 else 0.02)
        newest = load.get_newest_load()
        assert newest is not None
        host = Host(processes=3, frontend_lives=True, cpu_s=cpu_s)
        seen = watch.update(
            Sample(t=clock.now, epoch=1, load=newest[0], load_age_s=newest[1], host=host)
        )
        stalls += [second] if seen is not None else []
    assert bool(stalls) is hangs
    assert all(at > 310 for at in server.asked), "only while no step completes"
    assert server.asked
