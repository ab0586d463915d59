"""Measure the free host memory, within the limits of the cgroup (v1 or v2) and the machine.

Limits of parent cgroups are ignored.
"""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll_api.control_group import parse_memory_group
from plimsoll_engine.process.host_memory import read_byte_count

PROC_FOLDER, CGROUP_FOLDER = Path("/proc"), Path("/sys/fs/cgroup")
# By cgroup version: limit file, usage file, and the keys of the page cache in memory.stat.
_CGROUP_FILES = {
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def measure_host_headroom(proc: Path = PROC_FOLDER, cgroups: Path = CGROUP_FOLDER) -> int | None:
    """Return the size of the free host memory and the page cache in bytes; None if unknown."""
    found = [read_byte_count(str(proc / "meminfo"), "MemAvailable")]
    for folder, version in _list_cgroup_folders(proc, cgroups):
        if (folder / _CGROUP_FILES[version][1]).exists():
            found.append(_compute_free_bytes(folder, version))
            break
    return min((size for size in found if size is not None), default=None)


def _list_cgroup_folders(proc: Path, cgroups: Path) -> list[tuple[Path, int]]:
    # Folders and cgroup versions. The folder that is most likely this process's cgroup comes first.
    try:
        own = parse_memory_group(os.fsdecode((proc / "self/cgroup").read_bytes()))
    except OSError:
        own = None
    roots = {2: cgroups, 1: cgroups / "memory"}
    found = [(roots[own.version] / own.path.lstrip("/"), own.version)] if own else []
    return [*found, *((root, version) for version, root in roots.items())]


def _compute_free_bytes(folder: Path, version: int) -> int | None:
    limit_file, used_file, reclaimable = _CGROUP_FILES[version]
    limit, used = _read_number(folder / limit_file), _read_number(folder / used_file)
    if limit is None or used is None:
        return None
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        pairs = dict(line.split() for line in lines)
        cache = sum(int(pairs[key]) for key in reclaimable)
    except (OSError, ValueError, KeyError):
        cache = 0
    return max(0, limit - max(0, used - cache))


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
