"""An engine that restarts waits until its devices are free, but not forever.

Tests ``act/start_gate.py`` with the engine's side in ``process/start_gate.py``.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.start_gate import GATE_ANSWER_FILE, GATE_QUESTION_FILE, GateAnswer
from plimsoll_api.supervision import Action, Mode, StartGate, Supervision
from plimsoll_engine.process import start_gate as engine
from plimsoll_sidecar.act.start_gate import DeviceUse, EngineStartGate, GateOutcome, make_device_use
from plimsoll_sidecar.govern.command import Verb
from plimsoll_sidecar.signals.device_memory import DeviceBytes, DeviceUsers
from tests.unit.govern.governed import World, done

GIB = 1 << 30
FREE = DeviceUse("GPU-1", GIB // 2, 80 * GIB, "nobody")
HELD = DeviceUse("GPU-1", 60 * GIB, 80 * GIB, "process 7 (python)")
GATE = StartGate(within_s=60.0)


class Gate:
    """A gate with a device and a clock of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uses, self.now = folder, [HELD], 1000.0
        self.known = True
        self.starts = EngineStartGate(folder, lambda: self.uses if self.known else None)
        self.policy: StartGate | None = GATE
        self.update(answers=True)

    def ask(self, question: str = "0123456789abcdef") -> None:
        (self.folder / GATE_QUESTION_FILE).write_text(question)

    def update(self, seconds: float = 1.0, answers: bool = False) -> object:
        self.now += seconds
        return self.starts.handle_start_request(self.policy, answers, self.now)

    @property
    def answer(self) -> GateAnswer:
        return msgspec.json.decode((self.folder / GATE_ANSWER_FILE).read_bytes(), type=GateAnswer)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def test_a_start_is_held_until_the_device_is_free(gate: Gate) -> None:
    gate.ask()
    gate.update()
    assert gate.answer.answered == ""
    assert "60.0 GiB in use, held by process 7 (python)" in gate.answer.reason
    gate.update(30)
    gate.uses = [FREE]
    assert gate.update(5) is None
    assert gate.answer.answered == "0123456789abcdef"
    assert gate.starts.permitted_starts == [(GateOutcome.FREE, 35.0)]
    gate.uses = [HELD]
    assert gate.update() is None, "its own engine holds it now"


def test_it_starts_anyway_and_the_holder_is_named(gate: Gate) -> None:
    gate.ask()
    gate.update()
    held = gate.update(60)
    assert held is not None
    assert held.kind is IncidentKind.ORPHAN_DEVICE_MEMORY  # type: ignore[attr-defined]
    assert "process 7 (python)" in held.evidence[0]  # type: ignore[attr-defined]
    assert gate.answer.answered == "0123456789abcdef"
    assert gate.starts.permitted_starts == [(GateOutcome.TIMEOUT, 60.0)]
    assert gate.update() == held, "until the engine answers"
    assert gate.update(answers=True) is None


def test_with_a_replacement_it_is_held_on_but_not_for_ever(gate: Gate) -> None:
    gate.policy = StartGate(within_s=60.0, then=Action.POD_REPLACE)
    gate.ask()
    gate.update()
    assert gate.update(60) is not None
    assert gate.answer.answered == ""
    gate.update(600)
    assert gate.answer.answered == "0123456789abcdef"


@pytest.mark.parametrize("step_s", [5 * 3600.0, -5 * 3600.0])
def test_a_clock_that_is_set_changes_no_hold(gate: Gate, step_s: float) -> None:
    gate.ask()
    gate.update()
    gate.now += step_s
    gate.starts.shift_times(step_s)
    assert gate.update(59.0) is None
    assert gate.answer.answered == ""
    assert gate.update() is not None
    assert gate.starts.permitted_starts == [(GateOutcome.TIMEOUT, 60.0)]


def test_a_start_that_cannot_be_permitted_is_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(tmp_path)
    gate.uses = [FREE]
    gate.ask()
    (tmp_path / GATE_ANSWER_FILE).unlink()
    (tmp_path / GATE_ANSWER_FILE).mkdir()
    for _ in range(3):
        gate.update()
    assert gate.starts.permitted_starts == []
    assert len(caplog.records) == 1, "not with each sample"
    (tmp_path / GATE_ANSWER_FILE).rmdir()
    gate.update()
    assert gate.starts.permitted_starts == [(GateOutcome.FREE, 3.0)]


def test_what_is_unknown_holds_nothing(gate: Gate) -> None:
    gate.known = False
    gate.ask()
    gate.update()
    assert gate.answer.answered == "0123456789abcdef"
    assert gate.starts.permitted_starts == [(GateOutcome.UNKNOWN, 0.0)]


def test_each_start_asks_again_also_after_the_supervisor(gate: Gate) -> None:
    gate.uses = [FREE]
    gate.ask()
    gate.update()
    gate.uses = [HELD]
    gate.ask("fedcba9876543210")
    gate.update()
    assert gate.answer.answered == "0123456789abcdef"
    again = EngineStartGate(gate.folder, lambda: gate.uses)
    again.handle_start_request(GATE, False, gate.now)
    assert gate.answer.answered == ""
    later = EngineStartGate(gate.folder, lambda: gate.uses)
    later.handle_start_request(GATE, True, gate.now)
    assert gate.answer.answered == "fedcba9876543210", "this engine runs already"


@pytest.mark.parametrize("text", ["", "x", "0123456789abcdeZ", "0" * 5000, "\x00" * 16, "é" * 8])
def test_what_is_no_question_is_none(gate: Gate, text: str) -> None:
    gate.ask(text)
    gate.update()
    assert gate.answer == GateAnswer(gate.answer.at)


def test_a_pipe_or_a_link_in_place_of_the_question_stops_nothing(gate: Gate) -> None:
    os.mkfifo(gate.folder / GATE_QUESTION_FILE)
    gate.update()
    (gate.folder / GATE_QUESTION_FILE).unlink()
    (gate.folder / GATE_QUESTION_FILE).symlink_to("/dev/zero")
    gate.update()
    assert gate.answer.answered == ""


def test_without_a_gate_there_is_no_file_and_the_engine_starts(gate: Gate) -> None:
    gate.policy = None
    gate.update()
    assert not (gate.folder / GATE_ANSWER_FILE).exists()
    begin = time.monotonic()
    engine.wait_until_open(gate.folder)
    assert time.monotonic() - begin < 1.0
    assert not (gate.folder / GATE_QUESTION_FILE).exists()


@pytest.mark.parametrize("behind_s", [0.0, 3600.0, -3600.0])
def test_an_engine_waits_for_its_own_answer(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, behind_s: float
) -> None:
    """Also if the wall clock was set, which the supervisor's clock follows later."""
    monkeypatch.setattr(engine, "SUPERVISOR_TIMEOUT_S", 0.4)
    started = threading.Event()

    def start() -> None:
        engine.wait_until_open(gate.folder)
        started.set()

    gate.now = time.time() - behind_s
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10.0
    while not (gate.folder / GATE_QUESTION_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(8):
        gate.update(0.1)
        assert not started.wait(0.1)
    gate.uses = [FREE]
    gate.update(0.1)
    assert started.wait(10.0)
    thread.join(10.0)


def test_a_supervisor_that_is_gone_holds_nothing(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SUPERVISOR_TIMEOUT_S", 0.3)
    begin = time.monotonic()
    engine.wait_until_open(gate.folder)
    assert 0.3 <= time.monotonic() - begin < 5.0


def test_the_holders_are_those_that_the_driver_lists() -> None:
    memory = DeviceBytes(60 * GIB, 80 * GIB)
    mine = make_device_use("GPU-1", memory, DeviceUsers({os.getpid(): GIB}, None, 2))
    assert f"process {os.getpid()} (" in mine.holders
    assert "2 MPS clients" in mine.holders
    assert "another pod" in make_device_use("GPU-1", memory, DeviceUsers({}, None, 0)).holders
    assert make_device_use("GPU-1", DeviceBytes(2 * GIB, 141 * GIB), None).is_free
    assert not mine.is_free


@pytest.mark.parametrize("then", [None, Action.POD_REPLACE])
def test_the_incident_asks_for_another_pod_by_setting_only(then: Action | None) -> None:
    ladder = tuple(Action)
    one = World(
        Supervision(mode=Mode.RECOVER, ladder=ladder, start_gate=StartGate(60.0, then)),
    )
    one.suspect = False
    one.run(5)
    one.kind, one.suspect = IncidentKind.ORPHAN_DEVICE_MEMORY, True
    one.answers = False
    if then is None:
        one.run(40, *[done(one.to(Verb.DIAGNOSE))])
        assert Verb.TAKE_SLOT not in one.verbs
        assert one.ended[0].phase is IncidentPhase.UNRESOLVED
        return
    slot = one.to(Verb.TAKE_SLOT)
    assert not slot.leaves, "an engine that does not serve takes nothing out of service"
    one.run(3, done(slot))
    (incident,) = one.open
    assert incident.timeline[-1].step == "PodReplace"
    assert incident.phase is IncidentPhase.RESTARTING
