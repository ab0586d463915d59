"""The file through which the supervisor tells the launcher to be unready during a drain.

It holds the end of the drain in seconds of CLOCK_BOOTTIME, so that a supervisor that dies in the
middle never leaves its pod unready for ever, and a wall clock that is set changes nothing. The
launcher imports this module: it must stay small.
"""

from __future__ import annotations

import os
import time

NAME = "unready-until"
MAX_S = 3600.0


def write(state_dir: str, seconds: float) -> None:
    """Unready from now on, for at most ``seconds``."""
    until = time.clock_gettime(time.CLOCK_BOOTTIME) + min(seconds, MAX_S)
    path = os.path.join(state_dir, NAME)
    with open(f"{path}.new", "w") as out:
        out.write(f"{until:.3f}\n")
    os.replace(f"{path}.new", path)


def remove(state_dir: str) -> None:
    """Ready again."""
    path = os.path.join(state_dir, NAME)
    if os.path.exists(path):
        os.unlink(path)


def is_ready(state_dir: str) -> bool:
    """Return True unless a drain is on. A file that cannot be read means ready."""
    try:
        with open(os.path.join(state_dir, NAME)) as source:
            until = float(source.read())
    except (OSError, ValueError):
        return True
    return not 0 < until - time.clock_gettime(time.CLOCK_BOOTTIME) <= MAX_S
