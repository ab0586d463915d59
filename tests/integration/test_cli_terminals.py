"""The command line as a process: on wide, narrow and colourless terminals, in a pipe, and its exit
statuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.tools.shots import CONTROL, typed
from plimsoll_api.incident_record import JOURNAL_FILE, Attribution, Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_cli.incidents import STATE_DIR_NAME
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record.journal import Journal
from plimsoll_sidecar.record.storage import LastKnownEngine

PROGRAM = (sys.executable, "-m", "plimsoll_cli.main")
MIB = 1 << 20
STYLE = re.compile(r"\x1b\[[\d;]*m")
NAME = "leaky-0000002a"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one incident in its journal."""
    folder = tmp_path_factory.mktemp("run")
    (folder / STATE_DIR_NAME).mkdir()
    steps = [
        StepRecord(
            time=1000.0 + 10 * number,
            step=step,
            outcome=StepOutcome.SUCCEEDED,
            before_bytes=before * MIB,
            after_bytes=after * MIB,
            message="nothing, and that at length: " + "word " * 30,
        )
        for number, (step, before, after) in enumerate(
            [("Trim", 400, 398), ("WorkerRestart", 460, 350)]
        )
    ]
    incident = Incident(
        name=NAME, kind=IncidentKind.HOST_GROWTH, epoch="ab:1", opened_at=1000.0,
        phase=IncidentPhase.RESOLVED, reason=Reason.WORKER_RESTART, ended_at=1030.0,
        timeline=steps, returned_bytes=110 * MIB,
        attribution=Attribution(segment="malloc_in_use", bytes=60 * MIB, confidence=0.9),
    )  # fmt: skip
    journal = Journal(folder / STATE_DIR_NAME / JOURNAL_FILE)
    journal.write(GovernorState(), [incident], LastKnownEngine())
    journal.close()
    return folder


def on_terminal(run_dir: Path, columns: int, *arguments: str, **env: str) -> str:
    command = [*PROGRAM, *arguments, "--run-dir", str(run_dir)]
    return CONTROL.sub("", typed(command, columns, env))


def piped(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )  # fmt: skip


def test_terminals(run_dir: Path) -> None:
    wide = on_terminal(run_dir, 120, "explain", NAME)
    assert "\x1b[" in wide
    assert "█" in wide
    assert "Freed: 110 MiB" in wide
    grey = on_terminal(run_dir, 120, "explain", NAME, NO_COLOR="1")
    assert "\x1b[3" not in grey, "bold may stay, colours may not"
    ascii_only = on_terminal(run_dir, 60, "explain", NAME, PYTHONIOENCODING="ascii")
    assert ascii_only.replace("\x1b", "").isascii()
    assert "460 MiB |" in ascii_only
    narrow = STYLE.sub("", on_terminal(run_dir, 44, "incidents")).splitlines()
    assert narrow[0].split() == ["NAME", "PHASE", "WHAT"]
    assert NAME in narrow[1]
    assert all(len(line) <= 44 for line in narrow)


def test_a_pipe_and_what_the_exit_status_says(run_dir: Path, tmp_path: Path) -> None:
    listed = piped("incidents", "--run-dir", str(run_dir))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.split()[:3] == ["OPENED", "NAME", "TARGET"]
    assert "\x1b" not in listed.stdout
    absent = piped("explain", "nobody", "--run-dir", str(run_dir))
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr.startswith("plimsoll: incident nobody does not exist on this machine")
    gone = {"KUBECONFIG": str(tmp_path / "absent"), "HOME": str(tmp_path)}
    lost = piped("incidents", **gone)
    assert lost.returncode == 2
    assert "no cluster is configured" in lost.stderr
    assert "Traceback" not in lost.stderr + absent.stderr
