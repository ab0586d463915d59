"""A client that leaves, at each stage of a request: nothing stays, and the next one is served."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import time
from typing import Any

import openai
import pytest

MODEL = "tiny"


def request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps({"model": MODEL, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@contextlib.contextmanager
def connection(engine: Any, reset: bool) -> Any:
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        if reset:  # a RST instead of a FIN when it is closed
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield client


LONG = {"prompt": "Tide " * 400, "max_tokens": 3000, "stream": True}
MANY = {"messages": [{"role": "user", "content": "hi"}], "n": 8, "max_tokens": 3000, "stream": True}
GRAMMAR = {
    "prompt": "a", "max_tokens": 3000,
    "structured_outputs": {"regex": "|".join(f"[a-z]{{{n},900}}" for n in range(60))},
}  # fmt: skip


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("sent", "chunks"),
    [
        pytest.param(request("/v1/completions", LONG)[:30], 0, id="in-the-headers"),
        pytest.param(request("/v1/completions", LONG)[:-9], 0, id="in-the-body"),
        pytest.param(request("/v1/completions", LONG), 0, id="at-once"),
        pytest.param(request("/v1/completions", LONG | {"stream": False}), 0, id="no-stream"),
        pytest.param(request("/v1/completions", GRAMMAR), 0, id="while-compiling"),
        pytest.param(request("/v1/completions", LONG), 1, id="first-chunk"),
        pytest.param(request("/v1/completions", LONG), 20, id="in-the-stream"),
        pytest.param(request("/v1/chat/completions", MANY), 9, id="several-choices"),
        pytest.param(
            request("/v1/completions", {"prompt": "a", "max_tokens": 1}), 1, id="after-the-answer"
        ),
        pytest.param(request("/tokenize", {"prompt": "word " * 9_000}), 0, id="tokenizing"),
    ],
)
def test_nothing_stays_of_a_client_that_left(
    engine: Any, sent: bytes, chunks: int, reset: bool
) -> None:
    with connection(engine, reset) as client:
        client.sendall(sent)
        seen = b""
        while seen.count(b"\n\n") + seen.count(b"}") < chunks:
            data = client.recv(4096)
            assert data, seen
            seen += data
    engine.until(lambda: engine.status()["load"]["inflight"] == 0, "an end")
    engine.clean()
    engine.until(lambda: engine.status()["load"]["kv_lost_ratio"] == 0.0, "a report")
    answer = engine.client.completions.create(model=MODEL, prompt="Hull", max_tokens=2)
    assert answer.usage.completion_tokens == 2


def test_choices_with_a_lost_abort_are_reported_until_they_end(start_engine: Any) -> None:
    engine = start_engine("--num-blocks=400", inject="abort_choices").wait_ready()

    def lost() -> float:
        return float(engine.status()["load"].get("kv_lost_ratio", 0.0))

    with connection(engine, False) as client:
        client.sendall(request("/v1/chat/completions", MANY | {"max_tokens": 800}))
        assert client.recv(4096)

        def of_eight() -> dict[str, Any]:
            load: dict[str, Any] = engine.status()["load"]
            return load if load.get("running") == 8 else {}

        assert engine.found(of_eight, "eight choices")["kv_lost_ratio"] == 0.0
    worker = engine.worker_pid()

    def lost_of_a_slow_worker() -> dict[str, Any]:
        """Ten reports take five seconds: a fast one would be through with its tokens before."""
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(worker, signal.SIGCONT)
        load: dict[str, Any] = engine.status()["load"]
        return load if load.get("kv_lost_ratio", 0.0) > 0.1 else {}

    assert engine.found(lost_of_a_slow_worker, "lost blocks", timeout_s=60.0)["inflight"] == 0
    engine.until(lambda: lost() == 0.0, "an end", timeout_s=60.0)


def leaves_after(engine: Any, body: dict[str, Any], inflight: int) -> None:
    """A client that goes as soon as its requests are accepted."""
    with connection(engine, False) as client:
        client.sendall(request("/v1/completions", body))
        engine.until(lambda: engine.status()["load"]["inflight"] == inflight, "acceptance")
    engine.until(lambda: engine.status()["load"]["inflight"] == 0, "an end")


def test_a_client_that_leaves_the_queue(engine: Any) -> None:
    """The worker takes nothing in meanwhile: it learns of request and end at once."""
    worker = engine.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    try:
        leaves_after(engine, LONG, 1)
    finally:
        os.kill(worker, signal.SIGCONT)
    engine.clean()
    assert engine.client.completions.create(model=MODEL, prompt="Hull", max_tokens=2).choices


def test_a_client_that_leaves_while_its_prompts_are_computed(engine: Any) -> None:
    before = engine.status()["load"]["aborted_total"]
    prompts = [[40 + number] * 7_000 for number in range(4)]  # some thirty steps
    leaves_after(engine, {"prompt": prompts, "max_tokens": 1}, 4)
    engine.until(lambda: engine.status()["load"]["aborted_total"] > before, "an abort")
    engine.clean()
    assert engine.client.completions.create(model=MODEL, prompt="Hull", max_tokens=2).choices


@pytest.mark.long
def test_ten_thousand_queued_requests(start_engine: Any) -> None:
    """A full queue is told of, lets nobody else in, and goes away with its clients."""
    engine = start_engine("--max-queued", "10240", "--max-num-seqs", "4").wait_ready()
    full = MANY | {"n": 128}
    with contextlib.ExitStack() as clients:
        for _ in range(80):
            clients.enter_context(connection(engine, False)).sendall(
                request("/v1/chat/completions", full)
            )
        engine.until(lambda: engine.status()["load"]["inflight"] == 10240, "a full queue", 60)
        with pytest.raises(openai.RateLimitError) as refused:
            engine.client.completions.create(model=MODEL, prompt="a")
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        begun = time.monotonic()
        assert engine.get("/ready")[0] == 200
        assert time.monotonic() - begun < 2
    engine.until(lambda: engine.status()["load"]["inflight"] == 0, "an end of all", 60)
    engine.clean()
    assert engine.client.completions.create(model=MODEL, prompt="Hull", max_tokens=2).choices
