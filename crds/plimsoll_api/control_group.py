"""Find the control group that accounts for a process's memory.

The functions are pure: the caller reads ``/proc/PID/cgroup`` and resolves the relative paths.
"""

from __future__ import annotations

from typing import NamedTuple


class MemoryGroup(NamedTuple):
    """Control group: its ``version``, and its ``path`` in the memory controller's hierarchy."""

    version: int
    path: str


def memory_group(listing: str) -> MemoryGroup | None:
    """Return the memory control group in ``listing``, the text of ``/proc/PID/cgroup``, or None.

    If both versions are present, version 1 has the memory controller.
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
