"""List the threads of this process, and count the CPU cores that it may use."""

from __future__ import annotations

import os
from pathlib import Path


def count_cores_per_process(num_processes: int = 1) -> int:
    """Return the number of CPU cores for each of ``num_processes`` processes, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def list_threads() -> list[str]:
    """Return the names of this process's threads, the main thread first."""
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    return [(task / "comm").read_text().strip() for task in tasks]
