"""Access files that several processes or containers share."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path) -> BinaryIO | None:
    """Open a regular file for reading; return None for another kind of file. Raises OSError.

    Another process may replace the file: a symbolic link is not followed, and a pipe does not
    block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=0)
    os.close(descriptor)
    return None


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. Raises OSError; the old file then stays."""
    fresh = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
