"""A recording over HTTP from an admin endpoint, with its token, and the replay of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from plimsoll_api import trace
from plimsoll_api.admin import EngineState, Load, ProcessMemory, Role, Status
from plimsoll_api.engines import EngineType
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervisor_config import (
    AMD_EXPORTER_PORT_ENV,
    NODE_IP_ENV,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
)
from plimsoll_sidecar import replay
from plimsoll_sidecar.replay import record
from tests.http_server import Handler, answering

AMD_PAGE = b"".join(
    b'gpu_%s_vram{gpu_id="%d",namespace="models",pod="%s",container="engine"} %d\n' % row
    for row in (
        (b"used", 0, b"qwen-0", 1000),
        (b"total", 0, b"qwen-0", 4000),
        (b"used", 1, b"qwen-1", 3000),
        (b"total", 1, b"qwen-1", 4000),
    )
)
"""A node's exporter: one device of our pod, one of another."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    yield process
    process.communicate(timeout=10)


@pytest.fixture
def url(child: subprocess.Popen[bytes]) -> Iterator[str]:
    steps = 0

    class Server(Handler):
        def do_GET(self) -> None:
            nonlocal steps
            if self.path == "/metrics":
                self.answer(200, AMD_PAGE)
                return
            steps += 1
            known = self.headers["Authorization"] == "Bearer secret"
            status = Status(
                state=EngineState.SERVING,
                epoch="aa:1",
                version="7",
                model="tiny",
                uptime_s=1.0,
                load=Load(running=1, waiting=0, inflight=1, steps_total=steps),
                processes=[ProcessMemory(Role.FRONTEND, child.pid)],
                report_age_s=0.1,
            )
            self.answer(200 if known else 401, msgspec.json.encode(status) if known else b"")

    with answering(Server) as port:
        yield f"http://127.0.0.1:{port}"


def config(url: str) -> SupervisorConfig:
    return SupervisorConfig(
        service=ServiceRef("tiny"),
        engine=EngineEndpoint(EngineType.PLIMSOLL, url, url),
        memory=MemoryPolicy(host=MemoryBudget(1 << 28, 3600.0, 1 << 32), warmup_s=1.0),
        sample_interval_s=0.05,
    )


def test_what_is_recorded_can_be_replayed(
    tmp_path: Path, url: str, child: subprocess.Popen[bytes]
) -> None:
    token, out = tmp_path / "token", tmp_path / "run.jsonl.gz"
    token.write_text("secret\n")
    count = record(config(url), token, out, threading.Event().wait, duration_s=1.0)
    header, samples = trace.read(out)
    found = list(samples)
    assert count == len(found) >= 10
    assert (header.engine.version, header.budget.host, header.limits.host) == (
        "7",
        trace.TraceBudget(1 << 28, 3600.0),
        1 << 32,
    )
    assert all(s.scrape_ok and s.epoch == 1 and (s.host.rss_anon or 0) > 0 for s in found)
    assert [line.event for line in replay.replay(out)] == ["summary"]


@pytest.mark.usefixtures("child")
def test_the_devices_of_the_pod_are_recorded_and_no_other_s(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = urlsplit(url)
    for name, value in {
        NODE_IP_ENV: str(address.hostname),
        AMD_EXPORTER_PORT_ENV: str(address.port),
        "POD_NAME": "qwen-0",
        "POD_NAMESPACE": "models",
    }.items():
        monkeypatch.setenv(name, value)
    token, out = tmp_path / "token", tmp_path / "run.jsonl"
    token.write_text("secret\n")
    record(config(url), token, out, threading.Event().wait, duration_s=0.3)
    found = list(trace.read(out)[1])
    assert [[(d.used, d.total) for d in s.device] for s in found] == [
        [(1000 << 20, 4000 << 20)] for _ in found
    ]
    assert found


def test_an_engine_that_refuses_the_token_is_recorded_as_unknown(tmp_path: Path, url: str) -> None:
    token, out = tmp_path / "token", tmp_path / "run.jsonl"
    token.write_text("wrong\n")
    record(config(url), token, out, threading.Event().wait, duration_s=0.3)
    found = list(trace.read(out)[1])
    assert all(not s.scrape_ok and s.host.rss_anon is None for s in found)


def test_a_place_that_cannot_be_written(tmp_path: Path, url: str) -> None:
    (tmp_path / "token").write_text("secret")
    out = tmp_path / "none" / "run.jsonl"
    with pytest.raises(OSError, match=str(out)):
        record(config(url), tmp_path / "token", out, threading.Event().wait, duration_s=0.1)
    assert os.listdir(tmp_path) == ["token"]
