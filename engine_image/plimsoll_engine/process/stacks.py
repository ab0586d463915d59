"""The stacks files of the engine's processes: written on SIGUSR1, and bounded in size and number.

The run directory is in memory and lives as long as the pod. Of the files of processes that have
ended the empty ones go, and of the others the newest stay. A process's file goes when its parent
reaps it, or with the next start of the frontend.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)

STACKS_DIRECTORY = "stacks"
KEPT = 8
"""Files of ended processes with stacks in them: what they hung in."""
MAX_BYTES = 1 << 20
"""A living process's file is begun again beyond this; a dump has some ten KiB."""


def stacks_path(run_dir: str | Path, role: str, pid: int) -> Path:
    """Where process ``pid`` appends its stacks on SIGUSR1: by faulthandler, so also in a hang."""
    return Path(run_dir) / STACKS_DIRECTORY / f"{role}-{pid}.txt"


def tidy(run_dir: str | Path) -> None:
    """Remove what nobody needs any more; what cannot be removed stays."""
    ended: list[tuple[int, Path]] = []
    for path in (Path(run_dir) / STACKS_DIRECTORY).glob("*-*.txt"):
        if os.path.exists(f"/proc/{path.stem.rpartition('-')[2]}"):
            continue
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_size:
                ended.append((found.st_mtime_ns, path))
            else:
                path.unlink()
    for _, path in sorted(ended)[:-KEPT]:
        with contextlib.suppress(OSError):
            path.unlink()


def bounded_size(path: Path) -> int:
    """Return the file's size in bytes, zero where there is none; a long one is emptied first."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            os.truncate(path, 0)
            size = 0
    except OSError:
        return 0
    return size


def write_stacks_on_sigusr1(run_dir: str, role: str) -> None:
    """SIGUSR1 appends the stacks of all threads to this process's stacks file, also in a hang.

    Where the run directory cannot be written they go to the log: no process ends for its stacks.
    """
    path = stacks_path(run_dir, role, os.getpid())
    file: TextIO
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Open for the life of the process: faulthandler writes to the descriptor from the handler.
        file = path.open("a")
    except OSError as error:
        log.warning("--run-dir: %s; stacks go to the log", error, extra={"role": role})
        file = sys.stderr
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
