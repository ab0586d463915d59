"""PID 1 of the supervisor's container survives any end of the supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll_sidecar.launcher import STOP_TIMEOUT_S, Launcher


def test_a_supervisor_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork bomb in the engine's container uses up the processes of the pod."""

    def spawn(*_: object, **__: object) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawn", spawn)
    launcher = Launcher([f"--state-dir={tmp_path}", "--host=127.0.0.1", "--probe-port=0"])
    launcher._start(100.0)
    assert launcher._child_pid == 0
    assert launcher._next_start_at > 100.0
    assert (
        "failed to start the supervisor: Resource temporarily unavailable"
        in capsys.readouterr().err
    )


STOPPED_IN_A_GAP = """
import os, signal, sys
from plimsoll_sidecar import launcher

real_spawn, real_wait, gap = os.posix_spawn, os.waitpid, sys.argv.pop(1)

def stop_now():
    os.kill(os.getpid(), signal.SIGTERM)

def spawn(path, command, *rest, **options):
    seconds = "0" if gap == "reaped" else "60"
    pid = real_spawn("/bin/sleep", ["sleep", seconds], *rest, **options)
    if gap == "started":
        stop_now()
    return pid

def wait(*arguments):
    ended = real_wait(*arguments)
    if gap == "reaped" and ended[0]:
        stop_now()
    return ended

os.posix_spawn, os.waitpid = spawn, wait
sys.exit(launcher.Launcher(sys.argv[1:]).run())
"""


@pytest.mark.parametrize("gap", ["reaped", "started"])
def test_a_stop_while_the_supervisor_ends_or_starts_is_orderly(tmp_path: Path, gap: str) -> None:
    """The PID of a supervisor that has been reaped may belong to another process."""
    arguments = [gap, f"--state-dir={tmp_path}", "--host=127.0.0.1", "--probe-port=0"]
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_IN_A_GAP, *arguments],
        capture_output=True, text=True, timeout=STOP_TIMEOUT_S - 1, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
