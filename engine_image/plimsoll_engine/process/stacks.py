"""Write stack traces of the engine's processes to files on SIGUSR1, and limit these files."""

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
# Maximum number of files of exited processes. The run directory is in memory.
MAX_STALE_FILES = 8
# Size above which the file of a running process is truncated. One dump has about 10 KiB.
MAX_FILE_BYTES = 1 << 20


def make_stacks_path(run_dir: str | Path, role: str, pid: int) -> Path:
    """Return the path of the file with the stack traces of process ``pid``."""
    return Path(run_dir) / STACKS_DIRECTORY / f"{role}-{pid}.txt"


def remove_stale_stacks(run_dir: str | Path) -> None:
    """Remove the files of exited processes that are empty or not among the newest."""
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
    for _, path in sorted(ended)[:-MAX_STALE_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()


def truncate_if_large(path: Path) -> int:
    """Truncate the file if it is larger than :data:`MAX_FILE_BYTES`. Return its new size."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            os.truncate(path, 0)
            size = 0
    except OSError:
        return 0
    return size


def write_stacks_on_sigusr1(run_dir: str, role: str) -> None:
    """Make SIGUSR1 append the stacks of all threads to a file, or to stderr without a file."""
    path = make_stacks_path(run_dir, role, os.getpid())
    file: TextIO
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Keep it open: faulthandler writes to the descriptor from the signal handler.
        file = path.open("a")
    except OSError as error:
        log.warning(
            "cannot write stack traces to --run-dir: %s; they go to the log instead",
            error,
            extra={"role": role},
        )
        file = sys.stderr
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
