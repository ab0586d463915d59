"""How much more host memory the engine may take, by its control group and by the machine.

Inside a container ``/sys/fs/cgroup`` shows its own group; outside the path in ``/proc/self/cgroup``
leads there. Version 1 and 2. A limit of a group above it is not seen.
"""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll_api.control_group import memory_group
from plimsoll_engine.process.host_memory import bytes_of

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_FILES = {
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}
"""By version: the limit, what is used, and what the kernel takes back of it when it must."""


def host_headroom(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the free bytes, the page cache among them; None where nothing says it."""
    found = [bytes_of(str(proc / "meminfo"), "MemAvailable")]
    for folder, version in _folders(proc, cgroups):
        if (folder / _FILES[version][1]).exists():
            found.append(_left(folder, version))
            break
    return min((size for size in found if size is not None), default=None)


def _folders(proc: Path, cgroups: Path) -> list[tuple[Path, int]]:
    """Return where the group's files may be, the likeliest place first."""
    try:
        own = memory_group(os.fsdecode((proc / "self/cgroup").read_bytes()))
    except OSError:
        own = None
    roots = {2: cgroups, 1: cgroups / "memory"}
    found = [(roots[own.version] / own.path.lstrip("/"), own.version)] if own else []
    return [*found, *((root, version) for version, root in roots.items())]


def _left(folder: Path, version: int) -> int | None:
    limit_file, used_file, reclaimable = _FILES[version]
    limit, used = _number(folder / limit_file), _number(folder / used_file)
    if limit is None or used is None:
        return None
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        pairs = dict(line.split() for line in lines)
        cache = sum(int(pairs[key]) for key in reclaimable)
    except (OSError, ValueError, KeyError):
        cache = 0
    return max(0, limit - max(0, used - cache))


def _number(path: Path) -> int | None:
    """Return None also for ``max``, which is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
