"""Which control group counts a process's memory: the engine asks for itself, the supervisor for it.

Pure: the reader of ``/proc/PID/cgroup`` decides what its paths are relative to.
"""

from __future__ import annotations

from typing import NamedTuple


class MemoryGroup(NamedTuple):
    """``version`` of control groups, and the ``path`` within the memory controller's hierarchy."""

    version: int
    path: str


def memory_group(listing: str) -> MemoryGroup | None:
    """Return the group that ``listing``, the text of ``/proc/PID/cgroup``, names.

    With both versions, that of version 1, which then has the memory controller. None where the
    listing names none.
    """
    unified: MemoryGroup | None = None
    for line in listing.split("\n"):
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return MemoryGroup(1, path)
        if separator and not controllers:
            unified = MemoryGroup(2, path)
    return unified
