"""How the supervisor takes its pod out of service for a drain, without any permission on pods.

The launcher answers the readiness probe. A file in the state directory tells it to be unready; it
holds the end of the drain in seconds of CLOCK_BOOTTIME, so that a supervisor that dies in the
middle never leaves a pod unready for ever, and a changed wall clock does not either.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

UNREADY_FILE = "unready-until"
MAX_UNREADY_S = 3600.0


def set_unready(state_dir: Path, seconds: float) -> None:
    """Unready from now on, for at most ``seconds``."""
    until = time.clock_gettime(time.CLOCK_BOOTTIME) + min(seconds, MAX_UNREADY_S)
    temporary = state_dir / f".{UNREADY_FILE}.{os.getpid()}"
    temporary.write_text(f"{until:.3f}\n")
    temporary.replace(state_dir / UNREADY_FILE)


def set_ready(state_dir: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (state_dir / UNREADY_FILE).unlink()


def is_ready(state_dir: Path) -> bool:
    """True unless a drain is on. A file that cannot be read means ready."""
    try:
        until = float((state_dir / UNREADY_FILE).read_text())
    except (OSError, ValueError):
        return True
    left = until - time.clock_gettime(time.CLOCK_BOOTTIME)
    return not (math.isfinite(left) and 0 < left <= MAX_UNREADY_S)
