"""Stack trace files of the engine's processes, written on SIGUSR1 and limited in size and number.

The run directory is in memory and lives as long as the pod. Of ended processes, empty files are
removed and the newest others are kept. That happens when the parent reaps a process, and at the
next start of the frontend.
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
"""Number of files of ended processes that are kept."""
MAX_BYTES = 1 << 20
"""Size above which a live process's file is truncated; a dump has about ten KiB."""


def stacks_path(run_dir: str | Path, role: str, pid: int) -> Path:
    """Return the file for stack traces of process ``pid``, which it writes on SIGUSR1.

    faulthandler writes it, even if the process hangs.
    """
    return Path(run_dir) / STACKS_DIRECTORY / f"{role}-{pid}.txt"


def tidy(run_dir: str | Path) -> None:
    """Remove files that are no longer needed. Ignores errors."""
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
    """Return the file's size in bytes, 0 if it is missing.

    Truncates a file above the limit first.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            os.truncate(path, 0)
            size = 0
    except OSError:
        return 0
    return size


def write_stacks_on_sigusr1(run_dir: str, role: str) -> None:
    """Append the stacks of all threads to this process's file on SIGUSR1, even if it hangs.

    They go to the log if the run directory is not writable.
    """
    path = stacks_path(run_dir, role, os.getpid())
    file: TextIO
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Keep it open: faulthandler writes to the descriptor from the signal handler.
        file = path.open("a")
    except OSError as error:
        log.warning("--run-dir: %s; stacks go to the log", error, extra={"role": role})
        file = sys.stderr
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
