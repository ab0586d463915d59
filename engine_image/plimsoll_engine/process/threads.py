"""Threads of this process, and the cores that it may use."""

from __future__ import annotations

import os
from pathlib import Path


def cores(processes: int = 1) -> int:
    """Return the cores that each of so many processes has for itself, one at least."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def threads() -> list[str]:
    """Return the names of this process's threads, the first one first."""
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    return [(task / "comm").read_text().strip() for task in tasks]
