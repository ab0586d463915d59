"""Open file descriptors of the engine's processes, against their limits.

A leak of descriptors is no growth of memory. It ends with a server that accepts no connection.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping

import psutil

from plimsoll_api.trace import OpenFiles

PERIOD_S = 15.0
MAX_COUNTED = 65_536
"""Entries of one process that are counted one by one, on kernels before 6.2; more is unknown."""


class OpenFilesReader:
    """Reads at intervals, and returns the newest reading in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        self._newest: OpenFiles | None = None

    def read(self, processes: Callable[[], Mapping[int, str]]) -> OpenFiles | None:
        """Return the process that is nearest to its limit, of those that can be read.

        ``processes`` gives the names of the engine's processes by PID. None if no process can be
        read.
        """
        now = self._clock()
        if now >= self._next:
            self._next = now + PERIOD_S
            self._newest = nearest(processes())
        return self._newest


def nearest(processes: Mapping[int, str]) -> OpenFiles | None:
    """Return the process with the largest share of its limit in use; None if none can be read."""
    found = []
    for pid, name in processes.items():
        count, limit = _open(f"/proc/{pid}/fd"), _limit(pid)
        if count is not None and limit is not None:
            found.append(OpenFiles(process=name, open=count, limit=limit))
    return max(found, key=lambda one: one.ratio, default=None)


def _open(folder: str) -> int | None:
    try:
        # Since Linux 6.2 the size of this folder is the number of its entries.
        if size := os.stat(folder).st_size:
            return size
        with os.scandir(folder) as entries:
            count = sum(1 for _ in itertools.islice(entries, MAX_COUNTED + 1))
    except OSError:
        return None
    return count if count <= MAX_COUNTED else None


def _limit(pid: int) -> int | None:
    """Return the soft limit; None where there is none, or it cannot be read."""
    try:
        soft, _ = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
    except (psutil.Error, OSError):
        return None
    return soft if soft > 0 else None
