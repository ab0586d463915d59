"""Target directory of a download: completeness, free space, disk errors and progress."""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import TypeGuard

log = logging.getLogger("download")

# This file has the checkpoint's version. It is written after all other files.
COMPLETE_MARKER = ".plimsoll-complete"
PROGRESS_INTERVAL_S = 10.0
# The same weights in other formats.
IGNORED_PATTERNS = ("*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "original/*")
_DISK_ERRNOS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO,
)  # fmt: skip


class DownloadError(Exception):
    """The checkpoint cannot be downloaded."""


def is_ignored(name: str) -> bool:
    """Report whether a file matches a pattern in :data:`IGNORED_PATTERNS`."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED_PATTERNS)


def read_complete_version(target: Path) -> str | None:
    """Return the version of the checkpoint in ``target``; None if it is incomplete."""
    try:
        return (target / COMPLETE_MARKER).read_text().strip()
    except FileNotFoundError:
        return None


def mark_complete(target: Path, version: str) -> None:
    """Write the completion marker of ``target`` atomically."""
    new = target / f"{COMPLETE_MARKER}.new"
    new.write_text(f"{version}\n")
    new.replace(target / COMPLETE_MARKER)


def mark_incomplete(target: Path) -> None:
    """Remove the completion marker. Call this before the first change of a file."""
    (target / COMPLETE_MARKER).unlink(missing_ok=True)


def make_unwritable_error(folder: Path | str, error: OSError) -> DownloadError:
    """Return an error that says how to make ``folder`` writable."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        action = "free space on its volume, or use a larger claim in spec.model.cache"
    elif error.errno == errno.EROFS:
        action = "mount its volume writable"
    else:
        action = "use a directory that is writable for this user"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return DownloadError(
        f"cannot write to {folder}: {reason}; {action}, then start again to resume"
    )


def is_disk_error(error: BaseException) -> TypeGuard[OSError]:
    """Report whether ``error`` is an error of the disk instead of the network."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRNOS


def check_free_space(target: Path, needed_bytes: int) -> None:
    """Raise DownloadError if the volume of ``target`` has too little free space."""
    free = shutil.disk_usage(target).free
    if needed_bytes > free:
        raise DownloadError(
            f"{target} has {free >> 20} MiB of free space, but the download needs up to "
            f"{needed_bytes >> 20} MiB: use a larger claim in spec.model.cache"
        )


def sum_file_bytes(folder: Path) -> int:
    """Return the total size in bytes of the readable files below ``folder``."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


class ProgressLogger:
    """Context manager that logs the downloaded size periodically."""

    def __init__(self, target: Path, total_bytes: int) -> None:
        self._target, self._expected_bytes = target, total_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._log_progress, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _log_progress(self) -> None:
        while not self._stop.wait(PROGRESS_INTERVAL_S):
            present = sum_file_bytes(self._target)
            log.info("downloaded %d of %d MiB", present >> 20, self._expected_bytes >> 20)
