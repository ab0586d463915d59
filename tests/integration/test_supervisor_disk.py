"""A state volume that is read-only or full, at the start and in the middle: a real tmpfs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentPhase
from plimsoll_sidecar.record.journal import Journal
from tests.integration.test_supervisor_crash import ENVIRONMENT, HERE, Rig
from tests.integration.volume import Volume, volume

WAIT_S = 60.0


class Watching:
    """A supervisor of the stand-in engine, in the volume's namespace; its log is read as it
    comes."""

    def __init__(self, rig: Rig, at: Volume, *arguments: str) -> None:
        command = [sys.executable, str(HERE / "supervise_standin.py")]
        command += ["--config", str(rig.config), "--run-dir", str(rig.run_dir)]
        command += ["--state-dir", str(rig.state_dir), "--limit", str(WAIT_S), *arguments]
        self.process = subprocess.Popen(
            at.inside(*command), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        self.lines: list[str] = []

    @property
    def log(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    def until(self, text: str) -> None:
        """Reads the log up to a line with this text; the program's own limit ends a wait."""
        for line in self.log:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} is not in the log: {''.join(self.lines)}")

    def end(self) -> int:
        self.lines += self.log.readlines()
        status = self.process.wait(WAIT_S)
        self.log.close()
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.log.close()


@contextmanager
def watching(rig: Rig, at: Volume, *arguments: str) -> Iterator[Watching]:
    running = Watching(rig, at, *arguments)
    try:
        yield running
    finally:
        running.kill()


def incidents(at: Volume, folder: Path) -> list[tuple[IncidentPhase, Reason | None]]:
    copy = folder / "copy"
    shutil.copytree(at.seen, copy)
    journal = Journal(copy / "journal.sqlite")
    found = [(one.phase, one.reason) for one in journal.read_recent(10)]
    journal.close()
    return found


def test_a_volume_that_is_full_at_the_start_is_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    with rig.engine(), volume(rig.state_dir) as state:
        ballast = state.fill()
        with watching(rig, state) as supervisor:
            supervisor.until("free space on its volume")
            assert rig.restarts == []
            ballast.unlink()
            assert supervisor.end() == 0, supervisor.lines
        assert len(rig.restarts) == 1
        assert incidents(state, tmp_path) == [(IncidentPhase.RESOLVED, Reason.WORKER_RESTART)]


@pytest.mark.parametrize("write", [2, 4])
def test_a_volume_that_fills_up_in_the_middle_stops_what_was_not_begun(
    tmp_path: Path, write: int
) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    with rig.engine(), volume(rig.state_dir) as state:
        with watching(rig, state, "--fill-at", str(write)) as supervisor:
            supervisor.until("free space on its volume")
            assert rig.restarts == []
            (state.seen / "ballast").unlink()
            assert supervisor.end() == 0, supervisor.lines
        assert len(rig.restarts) == 1
        assert incidents(state, tmp_path) == [(IncidentPhase.RESOLVED, Reason.WORKER_RESTART)]


def test_a_read_only_volume_is_watched_and_nothing_is_done(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    with rig.engine(), volume(rig.state_dir) as state:
        state.mount("remount,ro")
        with watching(rig, state) as supervisor:
            supervisor.until("make it writable")
            assert rig.restarts == []
            state.mount("remount,rw")
            supervisor.until("is writable again")
            assert supervisor.end() == 0, supervisor.lines
        assert len(rig.restarts) == 1


def test_diagnostics_without_room_are_left_out_and_the_cure_goes_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    (rig.state_dir / "diagnostics").mkdir()
    with rig.engine(), volume(rig.state_dir / "diagnostics", 16) as full:
        full.fill()
        with watching(rig, full) as supervisor:
            assert supervisor.end() == 0, supervisor.lines
        assert any("No space left" in line for line in supervisor.lines)
    (incident,) = rig.incidents
    assert (incident.phase, incident.reason) == (IncidentPhase.RESOLVED, Reason.WORKER_RESTART)
    assert incident.diagnostics == []
    assert all(step.outcome is not StepOutcome.BEGUN for step in incident.timeline)


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_the_launcher_says_which_volume_its_token_needs(tmp_path: Path, trouble: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with volume(run_dir, 16) as run:
        if trouble == "full":
            run.fill()
        else:
            run.mount("remount,ro")
        command = [sys.executable, "-m", "plimsoll_sidecar.launcher", "--config", "x"]
        command += ["--run-dir", str(run_dir), "--state-dir", str(tmp_path / "state")]
        done = subprocess.run(run.inside(*command), capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert str(run_dir) in done.stderr
    assert "Traceback" not in done.stderr
