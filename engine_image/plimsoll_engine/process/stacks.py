"""Write stack traces of the engine's processes to files on SIGUSR1, and remove old files.

The number and the size of the files are limited, because the run directory is in memory and exists
as long as the pod. Files of exited processes are removed if they are empty or not among the newest.
A parent process removes files after a child has exited, and the frontend also when it starts.
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
MAX_STALE_FILES = 8
"""Maximum number of stack files of exited processes that are kept."""
MAX_FILE_BYTES = 1 << 20
"""Size above which the file of a running process is truncated. One dump has about 10 KiB."""


def make_stacks_path(run_dir: str | Path, role: str, pid: int) -> Path:
    """Return the path of the file with the stack traces of process ``pid``."""
    return Path(run_dir) / STACKS_DIRECTORY / f"{role}-{pid}.txt"


def remove_stale_stacks(run_dir: str | Path) -> None:
    """Remove the files of exited processes that are empty or not among the newest.

    A file that cannot be removed is ignored.
    """
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
    """Truncate the file to 0 bytes if it is larger than :data:`MAX_FILE_BYTES`.

    Return the size of the file after that, in bytes; 0 if the file does not exist.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            os.truncate(path, 0)
            size = 0
    except OSError:
        return 0
    return size


def write_stacks_on_sigusr1(run_dir: str, role: str) -> None:
    """Make this process append the stacks of all threads to a file on SIGUSR1, even if it hangs.

    If the run directory is not writable, the stacks are written to stderr.
    """
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
