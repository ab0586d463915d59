"""Daemons of a lab: started apart, remembered by PID, ended by it, never by name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.errors import LabError

TERM_S = 3.0
KILL_S = 10.0
GARBAGE = {"GOGC": "300"}
"""Go collects garbage at four times what lives, not at twice: it took a sixth of the API server's
CPU, and costs 100 MiB."""
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """For ``preexec_fn``: the kernel kills the child when its parent ends, however it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Processes:
    """The daemons of one lab. ``detached`` ones outlive this process (`make cluster`); the others
    are killed by the kernel when it ends, however it ends. All inherit the descriptor ``lock``."""

    logs: Path
    detached: bool = False
    lock: int | None = None
    running: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a daemon whose output goes to ``NAME.log``."""
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if self.detached else die_with_parent,  # noqa: PLW1509 - no threads yet
                pass_fds=() if self.lock is None else (self.lock,),
                env=os.environ | GARBAGE,
            )
        self.running[name] = process.pid

    def check(self, name: str) -> None:
        """Raises :class:`LabError` with the end of the log when the daemon has ended."""
        if not alive(self.running[name]):
            tail = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
            raise LabError(f"{name} ended early; the end of its log:\n" + "\n".join(tail))

    def stop(self, *names: str) -> None:
        """TERM to all, KILL to what is left after :data:`TERM_S`."""
        pids = [pid for name in names if (pid := self.running.pop(name, None)) is not None]
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + TERM_S
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            if alive(pid):
                _signal(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        while any(alive(pid) for pid in pids):
            if time.monotonic() > deadline:
                raise LabError(f"{', '.join(names)} cannot be killed")
            time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a child of ours that has ended is reaped.

    A killed process shows as a zombie once its first thread has ended. On a busy machine the others
    may hold its ports for longer, and a child is only reaped after the last of them.
    """
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] != pid
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
