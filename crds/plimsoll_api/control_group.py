"""Find the control group that accounts for a process's memory, without I/O."""

from __future__ import annotations

from typing import NamedTuple


class MemoryGroup(NamedTuple):
    """Control group: its ``version``, and its ``path`` in the memory controller's hierarchy."""

    version: int
    path: str


def parse_memory_group(listing: str) -> MemoryGroup | None:
    """Return the memory control group in the content of ``/proc/PID/cgroup``, or None."""
    unified: MemoryGroup | None = None
    for line in listing.split("\n"):
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return MemoryGroup(1, path)
        if separator and not controllers:
            unified = MemoryGroup(2, path)
    return unified
