"""An engine whose status is no status: an error in time, a sample that is unknown, no restart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Stall, Supervision
from plimsoll_api.supervisor_config import EngineEndpoint, ServiceRef, SupervisorConfig
from plimsoll_sidecar.act.adapters import plimsoll_engine
from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.main import build_supervisor, create_parser
from tests.http_server import Handler, answering

SOUND = {
    "state": "serving", "epoch": "aa:1", "version": "1", "model": "m", "uptime_s": 1.0,
    "report_age_s": 0.1, "load": {"running": 1, "waiting": 1, "inflight": 2, "steps_total": 5},
    "processes": [{"role": "worker", "pid": 4_194_303, "malloc_in_use": 5}],
    "devices": [{"index": 0, "used": 5, "total": 9}],
    "capabilities": ["trim", "drain", "restart_worker", "restart_engine"],
}  # fmt: skip
HUGE = 2**80


def changed(**values: object) -> bytes:
    return json.dumps(SOUND | values).encode()


GARBAGE = {
    "no JSON": b"<html>502 Bad Gateway</html>",
    "another shape": b'{"state": "serving"}',
    "a state that is no word": changed(state="<confused>"),
    "no epoch": changed(epoch=None),
    "text for a number": changed(uptime_s="long"),
    "not a number": changed().replace(b'"uptime_s": 1.0', b'"uptime_s": NaN'),
    "cut in the middle": changed()[:-9],
    "not UTF-8": b'{"state": "\xff\xfe"}',
    "ten megabytes": changed(model="m" * (10 << 20)),
}
ODD = {
    "numbers beyond any machine": changed(
        processes=[{"role": "worker", "pid": HUGE, "malloc_in_use": HUGE, "python_objects": HUGE}],
        devices=[{"index": HUGE, "used": HUGE, "total": HUGE, "torch_reserved": HUGE}],
        load={"running": HUGE, "waiting": HUGE, "inflight": HUGE, "requests_total": HUGE},
        ledger=[{"owner": "o", "kind": "host", "bytes": HUGE, "bound": HUGE}],
    ),
    "numbers below zero": changed(
        uptime_s=-1.0,
        report_age_s=-1.0,
        processes=[{"role": "worker", "pid": -1, "malloc_in_use": -5, "python_objects": -5}],
        devices=[{"index": -1, "used": -5, "total": -9, "torch_allocated": -5}],
        load={"running": -1, "waiting": -1, "inflight": -1, "steps_total": -1},
    ),
    "words of a later engine": changed(
        state="confused",
        capabilities=["trim", "teleport"],
        ledger=[{"owner": "o", "kind": "tape", "bytes": 5, "bound": 9}],
        standby={"state": "half_awake"},
        later={},
    ),
    "the same process twice, and no worker": changed(processes=[{"role": "other", "pid": 1}] * 2),
}


@contextmanager
def server(body: bytes, pause_s: float = 0.0) -> Iterator[int]:
    """Answers everything with ``body``; with a pause, a byte at a time."""

    class Engine(Handler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            pieces = [body[i : i + 1] for i in range(len(body))] if pause_s else [body]
            try:
                for piece in pieces:
                    self.wfile.write(piece)
                    time.sleep(pause_s)
            except OSError:
                return

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with answering(Engine) as port:
        yield port


def engine_on(port: int, token: Path) -> PlimsollEngine:
    url = f"http://127.0.0.1:{port}"
    return PlimsollEngine(EngineEndpoint(EngineType.PLIMSOLL, url, url), token)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "admin-token"
    file.write_text("t")
    return file


@pytest.mark.parametrize("name", list(GARBAGE))
def test_a_status_that_is_none_is_an_error(name: str, token: Path) -> None:
    with server(GARBAGE[name]) as port, pytest.raises(EngineError) as said:
        engine_on(port, token).status()
    assert "/status" in str(said.value) or "is not a valid Status" in str(said.value)


def test_garbage_is_an_answer_and_nothing_is_none(token: Path) -> None:
    """The second witness of a silent status: any answer at the serving port says that it lives."""
    with server(b"garbage") as port:
        engine = engine_on(port, token)
        assert engine.is_serving()
    assert not engine.is_serving()


def test_an_answer_that_trickles_is_given_up_in_time(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes within the timeout of one read."""
    monkeypatch.setattr(plimsoll_engine, "REQUEST_TIMEOUT_S", 0.5)
    with server(changed(), pause_s=0.05) as port:
        began = time.monotonic()
        with pytest.raises(EngineError, match="was not complete within the timeout"):
            engine_on(port, token).status()
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("body", [*GARBAGE.values(), *ODD.values()], ids=[*GARBAGE, *ODD])
def test_a_supervisor_lives_on_it_and_sends_nothing(
    tmp_path: Path, token: Path, body: bytes
) -> None:
    with server(body) as port:
        config = SupervisorConfig(
            service=ServiceRef(name="odd"),
            engine=EngineEndpoint(
                type=EngineType.PLIMSOLL,
                admin_url=f"http://127.0.0.1:{port}",
                serving_url="http://127.0.0.1:1",
            ),
            memory=MemoryPolicy(
                host=MemoryBudget(1 << 20, 60.0), device=MemoryBudget(1 << 20, 60.0)
            ),
            supervision=Supervision(mode=Mode.RECOVER, stall=Stall(timeout_s=600.0)),
        )
        file = tmp_path / "supervisor.json"
        file.write_bytes(supervisor_config.encode_config(config))
        places = ["--config", str(file), "--run-dir", str(tmp_path), "--state-dir", str(tmp_path)]
        now = 0.0
        supervisor, metrics = build_supervisor(
            create_parser().parse_args(places), None, clock=lambda: now
        )
        for second in range(100):
            now = float(second)
            supervisor.tick(1_700_000_000.0 + now)
            metrics.render()
    state = json.loads(supervisor.display.state)
    assert state["open"] == []
    assert b"plimsoll_supervisor_samples_total 100.0" in metrics.render()
    if body in GARBAGE.values():
        assert b'plimsoll_signal_unknown_samples_total{signal="engine"} 100.0' in metrics.render()


def test_an_operation_in_a_state_of_a_later_engine_has_not_ended(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plimsoll_engine, "TRIM_TIMEOUT_S", 0.5)
    answer = b'{"id":"op-1","kind":"trim","state":"suspended","epoch_before":"aa:1","started_at":1}'
    trim = Command(verb=Verb.TRIM, operation_id="op-1", incident="i", epoch="aa:1", deadline_s=1.0)
    with server(answer) as port:
        result = engine_on(port, token).trim(trim)
    assert result.outcome is Outcome.FAILED
    assert "still running" in result.message
