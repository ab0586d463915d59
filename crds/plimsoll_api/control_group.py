"""Finds the control group that counts a process's memory, for the engine and for the supervisor.

Pure: the caller that reads ``/proc/PID/cgroup`` decides what its paths are relative to.
"""

from __future__ import annotations

from typing import NamedTuple


class MemoryGroup(NamedTuple):
    """A control group: its ``version``, and its ``path`` in the memory controller's hierarchy."""

    version: int
    path: str


def memory_group(listing: str) -> MemoryGroup | None:
    """Return the memory control group in ``listing``, the text of ``/proc/PID/cgroup``.

    If both versions are present, return that of version 1, which then has the memory controller.
    Return None if there is no group.
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
