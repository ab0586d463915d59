"""What a process of the engine owes its parent: to die with it, and to say where it hangs."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from plimsoll_engine.zygote_ipc import stacks_path

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def die_with_parent(parent: int) -> None:
    """Be killed when the process ``parent`` ends, also when it did already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def cores(processes: int = 1) -> int:
    """The cores that each of so many processes has for itself, one at least."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def threads() -> list[str]:
    """The names of this process's threads, the first one first."""
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    return [(task / "comm").read_text().strip() for task in tasks]


def write_stacks_on_sigusr1(run_dir: str, role: str) -> None:
    """SIGUSR1 appends the stacks of all threads to this process's stacks file, also in a hang."""
    path = stacks_path(run_dir, role, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    # Open for the life of the process: faulthandler writes to the descriptor from the handler.
    file = path.open("a")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
