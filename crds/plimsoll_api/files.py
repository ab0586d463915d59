"""Files that several processes or containers share."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO | None:
    """Open a file for reading; None if it is no regular file. Raises OSError.

    Another process may have put a link or a pipe there. Neither is followed, and
    opening a pipe does not wait.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=0)
    os.close(descriptor)
    return None


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file atomically. Raises OSError, and then leaves the old file as it was."""
    fresh = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
