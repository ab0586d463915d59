"""The adapters of vLLM, SGLang and an unknown engine, against servers that keep their routes."""

import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_api.admin import Capability, DrainMode, EngineState, Load, Role
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import (
    CONTAINER_ENV,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
    encode_config,
)
from plimsoll_sidecar.act.adapters import external_load, external_server
from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.signals.sampler import Sampler
from tests.http_server import Handler, answering
from tests.lab.certs import Authority
from tests.ports import free_port

BASE = {Capability.DRAIN, Capability.RESTART_ENGINE}


class Rig:
    """Stand-ins at one port, one after the other, and their adapter. They have a container's name,
    because an adapter without one takes what other tests left in a container for its engine."""

    def __init__(self, folder: Path) -> None:
        self.container = f"engine-{secrets.token_hex(4)}"
        self.port = free_port()
        self.log = folder / "log"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, kind: str, *arguments: str) -> int:
        command = [sys.executable, str(Path(__file__).parent / "standin_external.py")]
        command += [f"--kind={kind}", f"--port={self.port}", f"--log={self.log}", *arguments]
        environment = os.environ | {CONTAINER_ENV: self.container}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        return process.pid

    def adapter(
        self, kind: EngineType, serves: bool = True, group: Callable[[], bool] | None = None
    ) -> ExternalEngine:
        url = f"http://127.0.0.1:{self.port}"
        endpoint = EngineEndpoint(kind, url, url, "m", container=self.container, serves=serves)
        return ExternalEngine(endpoint, is_group_serving=group)

    @property
    def calls(self) -> list[str]:
        if not self.log.exists():
            return []
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines()]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    one = Rig(tmp_path)
    yield one
    for process in one.processes:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def command(epoch: str, verb: Verb, deadline_s: float = 1.0) -> Command:
    return Command(
        verb=verb,
        operation_id=f"i-{verb.value}",
        incident="i",
        epoch=epoch,
        mode=DrainMode.FINISH,
        deadline_s=deadline_s,
    )


@pytest.mark.parametrize(
    ("kind", "engine", "trims", "drained"),
    [
        ("vllm", EngineType.VLLM, [], []),
        ("vllm-pause", EngineType.VLLM, [], ["/pause"]),
        ("vllm-dev", EngineType.VLLM, ["/reset_prefix_cache", "/reset_mm_cache"], ["/pause"]),
        ("sglang", EngineType.SGLANG, ["/flush_cache"], ["/pause_generation"]),
        ("custom", EngineType.CUSTOM, [], []),
    ],
)
def test_only_what_the_server_has_is_offered_and_called(
    rig: Rig, kind: str, engine: EngineType, trims: list[str], drained: list[str]
) -> None:
    pid = rig.start(kind, "--cache-mib=32")
    adapter = rig.adapter(engine)
    status = adapter.status()
    assert status.state is EngineState.SERVING
    assert [process.pid for process in status.processes] == [pid]
    assert set(status.capabilities) == BASE | ({Capability.TRIM} if trims else set())
    assert rig.calls == [], "to ask what it can do does nothing"
    if trims:
        trim = command(status.epoch, Verb.TRIM)
        result = adapter.trim(trim)
        assert result.outcome is Outcome.SUCCEEDED, result
        assert "freed 32" in result.message
        assert rig.calls == trims
        again = adapter.trim(trim)
        assert again.outcome is Outcome.FAILED, "the server says 200, and nothing came back"
        assert rig.calls == [*trims, *trims]
    result = adapter.drain(command(status.epoch, Verb.DRAIN, 5.0))
    assert (result.outcome, result.message.split(";")[0]) == (Outcome.SUCCEEDED, "idle")
    assert [call.partition("?")[0] for call in rig.calls[2 * len(trims) :]] == drained
    assert adapter.status().state is EngineState.DRAINED
    adapter.resume(status.epoch)
    assert adapter.status().state is EngineState.SERVING


@pytest.mark.parametrize(
    ("kind", "engine", "version"),
    [
        ("vllm", EngineType.VLLM, "0.5.23"),
        ("sglang", EngineType.SGLANG, "0.5.23"),
        ("sglang-old", EngineType.SGLANG, "0.5.23"),
        ("custom", EngineType.CUSTOM, ""),
    ],
)
def test_the_version_is_the_server_s_own(
    rig: Rig, kind: str, engine: EngineType, version: str
) -> None:
    rig.start(kind)
    assert rig.adapter(engine).status().version == version


def test_an_unknown_version_is_requested_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.start("vllm", "--busy=1")
    adapter = rig.adapter(EngineType.VLLM)
    assert adapter.status().version == ""
    assert adapter.status().version == "", "not at every sample"
    monkeypatch.setattr(external_server, "RETRY_INTERVAL_S", 0.0)
    rig.processes[0].kill()
    rig.processes[0].wait(10)
    rig.start("vllm", "--busy=1")
    assert [adapter.status().version for _ in range(2)] == ["", "0.5.23"]


def test_a_server_that_answers_late_is_asked_for_its_routes_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a new supervisor would leave the engine paused that the last one drained."""
    rig.start("vllm-dev")
    epoch = rig.adapter(EngineType.VLLM).status().epoch
    adapter = rig.adapter(EngineType.VLLM)
    with monkeypatch.context() as slow:
        slow.setattr(external_server, "REQUEST_TIMEOUT_S", 1e-6)
        assert Capability.TRIM not in adapter.status().capabilities
    with pytest.raises(EngineError, match="the route /resume"):
        adapter.resume(epoch)
    assert Capability.TRIM not in adapter.status().capabilities, "not at every sample"
    monkeypatch.setattr(adapter._info, "_next_routes_at", time.monotonic())
    assert Capability.TRIM in adapter.status().capabilities
    adapter.resume(epoch)
    assert rig.calls == ["/resume"]


def test_an_engine_that_refuses_a_pause_for_its_api_key_is_resumed(rig: Rig) -> None:
    """SGLang with --api-key asks every POST for it: what it has not paused, it need not resume."""
    rig.start("sglang", "--api-key=secret")
    adapter = rig.adapter(EngineType.SGLANG)
    epoch = adapter.status().epoch
    result = adapter.drain(command(epoch, Verb.DRAIN, 5.0))
    assert result.outcome is Outcome.SUCCEEDED
    assert "POST /pause_generation failed with HTTP status 401" in result.message
    adapter.resume(epoch)
    assert adapter.status().state is EngineState.SERVING


def test_a_restart_is_fenced_by_the_process(rig: Rig) -> None:
    rig.start("vllm")
    adapter = rig.adapter(EngineType.VLLM)
    before = adapter.status().epoch
    restart = command(before, Verb.RESTART_ENGINE)
    assert adapter.restart_engine(restart).outcome is Outcome.SUCCEEDED
    assert rig.processes[0].wait(5) == 0
    assert adapter.restart_engine(restart).outcome is Outcome.REFUSED, "nobody serves"
    with pytest.raises(EngineError, match=f"{rig.container} has no running process"):
        adapter.status()
    rig.start("vllm")
    for again in (adapter, rig.adapter(EngineType.VLLM)):  # the second: a supervisor that restarted
        result = again.restart_engine(restart)
        assert result.outcome is Outcome.REFUSED
        assert before in result.message
    assert rig.processes[1].poll() is None
    assert adapter.status().epoch != before


def test_a_person_restarts_an_engine_that_has_no_worker(rig: Rig, tmp_path: Path) -> None:
    rig.start("vllm")
    endpoint = rig.adapter(EngineType.VLLM)._endpoint
    config = SupervisorConfig(service=ServiceRef(name="s"), engine=endpoint)
    (tmp_path / "supervisor.json").write_bytes(encode_config(config))

    def ask(*arguments: str) -> ActionAnswer:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "plimsoll_sidecar.ask", *arguments),
                *(f"--config={tmp_path}/supervisor.json", f"--run-dir={tmp_path}"),
                f"--state-dir={tmp_path}",
            ],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return msgspec.json.decode(done.stdout, type=ActionAnswer)

    seen = ask("status")
    assert seen.capabilities == ["drain", "restart_engine"]
    assert seen.epoch == rig.adapter(EngineType.VLLM).status().epoch, "every process says the same"
    assert ask("restart", f"--expected-epoch={seen.epoch}").outcome == "Succeeded"
    assert rig.processes[0].wait(5) == 0


class Bad(Handler):
    """/huge never ends, /drip ends after a minute, anything else is no HTTP."""

    def do_GET(self) -> None:
        if self.path not in ("/huge", "/drip"):
            self.wfile.write(b"\x00garbage\r\n")
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(600):
                self.wfile.write(b"a" * (1 << 20) if self.path == "/huge" else b"a")
                time.sleep(0.1 if self.path == "/drip" else 0.0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/huge", "larger than 4 MiB"),
        ("/drip", "was not complete within the timeout"),
        ("/metrics", "GET /metrics"),
    ],
)
def test_an_answer_that_is_none_is_an_error_in_time(path: str, message: str) -> None:
    begin = time.monotonic()
    with answering(Bad) as port, pytest.raises(EngineError, match=message):
        HttpClient(f"http://127.0.0.1:{port}").call("GET", path, 1.0)
    assert time.monotonic() - begin < 5.0


class Well(Handler):
    def do_GET(self) -> None:
        self.answer(200, b"well")


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")
def test_an_engine_that_serves_tls_alone_is_understood(tmp_path: Path) -> None:
    """As vLLM and SGLang do with --ssl-certfile; the certificate names the Service."""
    Authority(tmp_path).serving("engine", "engine", ["engine.default.svc"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "engine.crt", tmp_path / "engine.key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Well)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        client = HttpClient(f"https://127.0.0.1:{server.server_port}")
        assert client.call("GET", "/health", 2.0) == (200, b"well")
        assert client.responds_to_get("/health", 2.0)
        with pytest.raises(EngineError):
            HttpClient(f"http://127.0.0.1:{server.server_port}").call("GET", "/health", 2.0)
    finally:
        server.shutdown()
        server.server_close()


def test_requests_that_arrive_are_those_that_have_ended_and_those_in_flight(rig: Rig) -> None:
    rig.start("vllm", "--running=2")
    adapter = rig.adapter(EngineType.VLLM)
    adapter.status()
    assert adapter.read_arrivals() is None, "the page has no finished requests yet"
    client = HttpClient(f"http://127.0.0.1:{rig.port}")
    for expected in (3, 4):
        assert client.call("POST", "/v1/completions", 5.0, b"{}")[0] == 200
        found = adapter.read_arrivals()
        assert found is not None
        assert found.total == expected
        assert 0 < found.uptime_s < 60
    rig.processes[0].kill()
    rig.processes[0].wait(10)
    with pytest.raises(EngineError):
        adapter.status()
    assert adapter.read_arrivals() is None


def test_a_drain_waits_for_work_no_longer_than_its_deadline(rig: Rig) -> None:
    rig.start("vllm", "--running=3")
    adapter = rig.adapter(EngineType.VLLM)
    epoch = adapter.status().epoch
    begin = time.monotonic()
    result = adapter.drain(command(epoch, Verb.DRAIN, 1.5))
    assert "3 requests are still running" in result.message
    assert 1.4 < time.monotonic() - begin < 4.0


def test_a_connection_is_work_where_the_page_lacks_the_waiting_requests(rig: Rig) -> None:
    rig.start("vllm", "--no-queue")
    adapter = rig.adapter(EngineType.VLLM)
    status = adapter.status()
    assert (status.load.running, status.load.waiting) == (0, None)
    with socket.create_connection(("127.0.0.1", rig.port)):
        result = adapter.drain(command(status.epoch, Verb.DRAIN, 1.0))
        assert "1 requests are still running" in result.message
    assert adapter.drain(command(status.epoch, Verb.DRAIN, 5.0)).message == "idle"


@pytest.mark.parametrize("kind", ["vllm-pause", "sglang"])
def test_a_drain_that_was_ended_while_it_waited_pauses_nothing(rig: Rig, kind: str) -> None:
    rig.start(kind, "--running=3")
    adapter = rig.adapter(EngineType.SGLANG if kind == "sglang" else EngineType.VLLM)
    epoch = adapter.status().epoch
    looks = iter([True, True, False])
    begin = time.monotonic()
    result = adapter.drain(command(epoch, Verb.DRAIN, 60.0), lambda: next(looks, False))
    assert result.outcome is Outcome.REFUSED
    assert time.monotonic() - begin < 30.0
    assert not [call for call in rig.calls if call.partition("?")[0].startswith("/pause")]
    assert adapter.status().state is EngineState.SERVING


def test_a_drain_waits_for_kv_blocks_that_no_page_shows(rig: Rig, tmp_path: Path) -> None:
    """Other engines may still read them, and their requests would fail."""
    rig.start("sglang", f"--no-page={tmp_path / 'busy'}", "--disaggregation-mode=prefill")
    adapter = rig.adapter(EngineType.SGLANG)
    drain = command(adapter.status().epoch, Verb.DRAIN, 2.0)
    assert adapter.drain(drain).message.startswith("idle")
    adapter.resume(drain.epoch)
    (tmp_path / "busy").touch()
    begin = time.monotonic()
    assert "still hold an unknown share of the KV cache" in adapter.drain(drain).message
    assert time.monotonic() - begin >= 2.0


def test_requests_finish_and_more_may_come_before_a_pod_is_replaced(rig: Rig) -> None:
    rig.start("vllm-pause", "--running=3")
    adapter = rig.adapter(EngineType.VLLM)
    epoch = adapter.status().epoch
    result = adapter.finish_requests(command(epoch, Verb.LEAVE, 1.5))
    assert (result.outcome, result.message) == (
        Outcome.SUCCEEDED,
        "3 requests are still running",
    )
    assert adapter.status().state is EngineState.SERVING, "the operator may be away"
    assert "/pause" not in rig.calls
    stale = adapter.finish_requests(command("another:1", Verb.LEAVE, 5.0))
    assert stale.outcome is Outcome.REFUSED


def test_the_worker_of_a_multi_node_engine_is_its_process(rig: Rig) -> None:
    pid = rig.start("vllm", "--worker")
    adapter = rig.adapter(EngineType.VLLM, serves=False)
    status = adapter.status()
    assert (status.state, status.load, status.load_age_s) == (EngineState.SERVING, Load(), None)
    assert [(one.role, one.pid) for one in status.processes] == [(Role.FRONTEND, pid)]
    assert not adapter.is_serving()


def test_a_worker_starts_until_its_group_serves(rig: Rig) -> None:
    """It loads its part of the model for as long as that takes: no growth, and no warm-up yet."""
    rig.start("vllm", "--worker")
    answers = iter([False, True])
    adapter = rig.adapter(EngineType.VLLM, serves=False, group=lambda: next(answers))
    assert not Sampler(adapter).sample().ready
    assert adapter.status().state is EngineState.SERVING
    assert adapter.status().state is EngineState.SERVING, "not asked again"


def test_a_connection_is_work_where_there_are_no_metrics(rig: Rig) -> None:
    rig.start("custom")
    adapter = rig.adapter(EngineType.CUSTOM)
    epoch = adapter.status().epoch
    with socket.create_connection(("127.0.0.1", rig.port)):
        result = adapter.drain(command(epoch, Verb.DRAIN, 1.0))
        assert "1 requests are still running" in result.message
    assert adapter.drain(command(epoch, Verb.DRAIN, 5.0)).message == "idle"


def test_a_pause_is_known_where_the_server_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused vLLM keeps its requests: to the sampler it looks like one that hangs."""
    monkeypatch.setattr(external_load, "SCRAPE_INTERVAL_S", 0.05)
    monkeypatch.setattr(external_load, "STALLED_SCRAPE_INTERVAL_S", 0.05)
    rig.start("vllm-pause", "--running=2")
    sampler = Sampler(rig.adapter(EngineType.VLLM))
    server = HttpClient(f"http://127.0.0.1:{rig.port}")

    def load_when(moves: bool) -> Load:
        deadline = time.monotonic() + 10
        before = sampler.sample().load.steps_total
        while time.monotonic() < deadline:
            time.sleep(0.1)
            load = sampler.sample().load
            if (load.steps_total != before) is moves:
                return load
            before = load.steps_total
        raise AssertionError("the engine did neither")

    assert load_when(moves=True).paused is None
    assert "/is_paused" not in rig.calls, "an engine that makes steps is not asked"
    server.call("POST", "/pause?mode=keep", 3.0, b"")
    paused = load_when(moves=False)
    assert (paused.paused, paused.running, paused.inflight) == (True, 2, 2)
    server.call("POST", "/resume", 3.0, b"")
    assert load_when(moves=True).paused is None


def test_a_sample_of_an_external_engine_knows_load_and_memory_and_no_ledger(rig: Rig) -> None:
    rig.start("vllm", "--running=2")
    sample = Sampler(rig.adapter(EngineType.VLLM)).sample()
    assert sample.scrape_ok
    assert (sample.load.running, sample.load.waiting, sample.load.kv_usage_ratio) == (2, 0, 0.5)
    assert sample.load.steps_total is not None
    assert sample.host.rss_anon is not None
    assert sample.ledger is None
    assert sample.device == []
