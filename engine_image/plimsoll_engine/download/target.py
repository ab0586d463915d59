"""The directory that a checkpoint is downloaded into: space, progress, and the mark of the end."""

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
"""Written last: names the version that the directory holds."""
PROGRESS_S = 10.0
IGNORED = ("*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "original/*")
"""The same weights in other formats."""


_OF_DISK = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO,
)  # fmt: skip


class DownloadError(Exception):
    """Why there is no checkpoint, and what to do about it."""


def ignored(name: str) -> bool:
    """Whether a file of a checkpoint is not wanted."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)


def complete(target: Path) -> str | None:
    """Return the version in ``target``, None where it is not all there."""
    try:
        return (target / COMPLETE).read_text().strip()
    except FileNotFoundError:
        return None


def finish(target: Path, version: str) -> None:
    """Mark ``target`` as complete: in one step, so that a full disk leaves no empty mark."""
    new = target / f"{COMPLETE}.new"
    new.write_text(f"{version}\n")
    new.replace(target / COMPLETE)


def begin(target: Path) -> None:
    """Take the mark away before the first file changes.

    Half of a new version among the files of an old one is neither.
    """
    (target / COMPLETE).unlink(missing_ok=True)


def unwritable(folder: Path | str, error: OSError) -> DownloadError:
    """For a disk that is full or read-only, also in the middle of a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cure = "make room on its volume, or name a larger claim in spec.model.cache"
    elif error.errno == errno.EROFS:
        cure = "mount its volume writable"
    else:
        cure = "see that it is a folder which this user may write"
    what = os.strerror(error.errno) if error.errno else str(error)
    return DownloadError(
        f"{folder} cannot be written: {what}; the files downloaded so far are kept: {cure}"
    )


def is_of_disk(error: BaseException) -> TypeGuard[OSError]:
    """Whether an error of a library is the disk's: those of the network are OSErrors too."""
    return isinstance(error, OSError) and error.errno in _OF_DISK


def require_space(target: Path, needed: int) -> None:
    """:class:`DownloadError` where ``needed`` bytes do not fit."""
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DownloadError(
            f"{target} has {free >> 20} MiB left and up to {needed >> 20} MiB are needed: name a "
            "larger claim in spec.model.cache"
        )


def size_of(folder: Path) -> int:
    """Bytes of all files below ``folder``; files that vanish meanwhile count as none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


class Progress:
    """Says how far it is, every :data:`PROGRESS_S`."""

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
            here = size_of(self._target)
            log.info("%d of %d MiB", here >> 20, self._wanted >> 20)
