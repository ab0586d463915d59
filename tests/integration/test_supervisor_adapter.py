"""The adapter over HTTP: fences, repetitions, a wrong token, an engine that is not there."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_api.admin import Diagnostic, EngineState, Epoch, Status
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.plimsoll_engine import REQUEST_TIMEOUT_S, PlimsollEngine
from plimsoll_sidecar.act.adapters.processes import MAIN_EXIT_WAIT_S, Terminator
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command, Outcome, Result, Verb
from plimsoll_sidecar.signals.process_table import identify
from tests.ports import free_port


def command(epoch: str, verb: Verb = Verb.RESTART_WORKER, number: int = 1) -> Command:
    return Command(
        verb=verb, operation_id=f"op-{number}", incident="i-1", epoch=epoch, deadline_s=5.0
    )


class Rig:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.token, self.log = folder / "token", folder / "log"
        self.token.write_text("right")
        url = f"http://127.0.0.1:{self.port}"
        self.client = PlimsollEngine(EngineEndpoint(EngineType.PLIMSOLL, url, url), self.token)
        arguments = [str(Path(__file__).parent / "standin_engine.py"), "--port", str(self.port)]
        arguments += ["--token-file", str(self.token), "--log", str(self.log)]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n"

    def status_when_back(self) -> Status:
        """The status, as soon as the engine that is starting again listens."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return self.client.status()
            except EngineError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_a_repeated_restart_happens_once(rig: Rig) -> None:
    epoch = rig.client.status().epoch
    for _ in range(2):
        assert rig.client.restart_worker(command(epoch)).outcome is Outcome.SUCCEEDED
    assert len(rig.log.read_text().splitlines()) == 1
    assert Epoch.parse(rig.client.status().epoch).number == Epoch.parse(epoch).number + 1


def test_another_epoch_refuses(rig: Rig) -> None:
    result = rig.client.restart_worker(command("elsewhere:1"))
    assert result.outcome is Outcome.REFUSED
    assert "EpochChanged" in result.message
    assert not rig.log.exists()


def test_an_engine_restart_ends_the_boot(rig: Rig) -> None:
    before = rig.client.status().epoch
    drained = rig.client.drain(command(before, Verb.DRAIN, 1))
    assert drained.outcome is Outcome.SUCCEEDED
    assert rig.client.status().state is EngineState.DRAINED
    result = rig.client.restart_engine(command(before, Verb.RESTART_ENGINE, 2))
    # Either the connection broke first, or the engine that came back refused the old epoch.
    assert result.outcome in (Outcome.SUCCEEDED, Outcome.REFUSED)
    assert Epoch.parse(rig.status_when_back().epoch).boot_id != Epoch.parse(before).boot_id
    assert len(rig.log.read_text().splitlines()) == 1


def test_an_engine_that_answers_late_has_not_ended(rig: Rig) -> None:
    """Otherwise its pod would be ready again while it still ends."""
    epoch = rig.client.status().epoch
    results: list[Result] = []
    restart = command(epoch, Verb.RESTART_ENGINE)
    thread = threading.Thread(target=lambda: results.append(rig.client.restart_engine(restart)))
    thread.start()
    while rig.client.status().state is not EngineState.RESTARTING:
        time.sleep(0.01)
    rig.process.send_signal(signal.SIGSTOP)
    try:
        thread.join(REQUEST_TIMEOUT_S + MAIN_EXIT_WAIT_S + 1.0)
        assert not results, "the engine still runs"
    finally:
        rig.process.send_signal(signal.SIGCONT)
        thread.join(30)
    assert results[0].outcome in (Outcome.SUCCEEDED, Outcome.REFUSED)


def test_a_wrong_token_is_said(rig: Rig) -> None:
    epoch = rig.client.status().epoch
    rig.token.write_text("wrong")
    with pytest.raises(EngineError, match=r"HTTP 401 \(Unauthorized\)"):
        rig.client.status()
    result = rig.client.trim(command(epoch, Verb.TRIM))
    assert result.outcome is Outcome.FAILED
    assert "401" in result.message
    rig.token.unlink()
    with pytest.raises(EngineError, match=r"admin token .*token"):
        rig.client.status()


def test_diagnostics_are_text(rig: Rig) -> None:
    save = command("any", Verb.DIAGNOSE)
    assert b"stacks" in rig.client.read_diagnostic(Diagnostic.STACKS, save)


def test_an_engine_that_is_away_is_an_error(rig: Rig) -> None:
    rig.close()
    with pytest.raises(EngineError):
        rig.client.status()


def test_a_pid_of_another_process_is_never_signalled(rig: Rig) -> None:
    process = identify(rig.process.pid)
    assert process is not None
    stranger = type(process)(process.pid, process.started + 1)
    assert Terminator([stranger]).terminate(stranger).error is None
    assert Terminator([process], lambda one: False).terminate(None).error is None
    assert rig.process.poll() is None
    assert Terminator([process]).terminate(process).error is None
    assert rig.process.wait(5) == -15
    assert identify(rig.process.pid) is None
