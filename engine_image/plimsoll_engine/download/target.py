"""Directory that a checkpoint is downloaded to: free space, progress, and completion marker."""

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

COMPLETE = ".plimsoll-complete"
"""Completion marker: a file, written last, with the version in the directory."""
PROGRESS_S = 10.0
IGNORED = ("*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "original/*")
"""Files with the same weights in other formats."""


_OF_DISK = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO,
)  # fmt: skip


class DownloadError(Exception):
    """The checkpoint is not available. The message says why and what to do."""


def is_ignored(name: str) -> bool:
    """Report whether a file of a checkpoint is not needed."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)


def complete(target: Path) -> str | None:
    """Return the version in ``target``; None if it is incomplete."""
    try:
        return (target / COMPLETE).read_text().strip()
    except FileNotFoundError:
        return None


def finish(target: Path, version: str) -> None:
    """Write the completion marker of ``target``, atomically."""
    new = target / f"{COMPLETE}.new"
    new.write_text(f"{version}\n")
    new.replace(target / COMPLETE)


def begin(target: Path) -> None:
    """Remove the completion marker, before the first file changes.

    A mixture of two versions is neither of them.
    """
    (target / COMPLETE).unlink(missing_ok=True)


def unwritable_error(folder: Path | str, error: OSError) -> DownloadError:
    """Return the error for a disk that is full or read-only."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cure = "free space on its volume, or name a larger claim in spec.model.cache"
    elif error.errno == errno.EROFS:
        cure = "mount its volume writable"
    else:
        cure = "make sure that it is a folder and writable for this user"
    what = os.strerror(error.errno) if error.errno else str(error)
    return DownloadError(
        f"{folder} cannot be written: {what}; the files downloaded so far are kept: {cure}"
    )


def is_disk_error(error: BaseException) -> TypeGuard[OSError]:
    """Report whether an error comes from the disk. Network errors are OSErrors as well."""
    return isinstance(error, OSError) and error.errno in _OF_DISK


def require_space(target: Path, needed: int) -> None:
    """Raise :class:`DownloadError` if ``needed`` bytes do not fit."""
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DownloadError(
            f"{target} has {free >> 20} MiB free, but up to {needed >> 20} MiB are needed: name a "
            "larger claim in spec.model.cache"
        )


def total_bytes(folder: Path) -> int:
    """Return the bytes of all files below ``folder``, ignoring files that vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


class Progress:
    """Context that logs the progress every :data:`PROGRESS_S` seconds."""

    def __init__(self, target: Path, wanted: int) -> None:
        self._target, self._wanted = target, wanted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PROGRESS_S):
            here = total_bytes(self._target)
            log.info("%d of %d MiB", here >> 20, self._wanted >> 20)
