"""Read the memory of the engine's cgroup, version 1 or 2.

The memory is unknown if the cgroup also has processes of other programs, such as the supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG

import msgspec

from plimsoll_api.units import parse_whole_number
from plimsoll_sidecar.signals.engine_processes import WRAPPER_PROGRAMS
from plimsoll_sidecar.signals.process_table import (
    find_descendants,
    find_memory_group,
    iterate_ancestors,
    read_command_name,
    read_parent_pids,
)

CGROUP_ROOT = Path("/sys/fs/cgroup")
# memory.stat has about 2 KiB.
MAX_FILE_BYTES = 1 << 16
# Larger limits mean "no limit" in version 1, where the kernel writes almost 2**63.
UNLIMITED_BYTES = 1 << 60


class CgroupMemory(msgspec.Struct, frozen=True):
    """Memory of a cgroup in bytes; None if unknown.

    Version 1 reports no ``ooms``, ``throttled``, ``stalled_some_s`` and ``stalled_full_s``.

    Attributes:
        file: Page cache, without shared memory.
        kernel: Kernel memory that cannot be reclaimed, without compressed pages (zswap). Version 1
            does not report it.
        sock: Socket buffers.
        other: Memory that is charged to the group but appears in none of the kernel's counters,
            such as the unmapped parts of transparent huge pages.
        reclaimable: Memory that the kernel frees before it kills a process.
        swap: Pages that are only in swap. The kernel does not report their kind; nearly all are
            anonymous.
        limit: The lowest limit of the group and of its visible ancestors.
        oom_kills: The number of processes of the group that the kernel killed.
        ``ooms``: The number of times that the group ran out of memory.
        throttled: The number of times that the group exceeded ``memory.high``.
        stalled_some_s, stalled_full_s: The seconds since the group's creation in which some or all
            of its tasks waited for memory (pressure stall information, PSI).

    """

    current: int | None = None
    anon: int | None = None
    shmem: int | None = None
    file: int | None = None
    slab: int | None = None
    kernel: int | None = None
    sock: int | None = None
    other: int | None = None
    reclaimable: int | None = None
    swap: int | None = None
    limit: int | None = None
    oom_kills: int | None = None
    ooms: int | None = None
    throttled: int | None = None
    stalled_some_s: float | None = None
    stalled_full_s: float | None = None

    @property
    def limit_ratio(self) -> float | None:
        """Share of the limit that is in use and not reclaimable; None if unknown."""
        if self.current is None or self.reclaimable is None or not self.limit:
            return None
        return max(0, self.current - self.reclaimable) / self.limit


class Cgroup:
    """Memory files of the cgroup of one process."""

    def __init__(self, folder: Path, version: int, root: Path | None = None) -> None:
        self.folder = folder
        self.version = version
        ancestors = folder.parents if root is not None and folder.is_relative_to(root) else ()
        self._ancestors = [
            ancestor for ancestor in ancestors if root is not None and ancestor.is_relative_to(root)
        ]

    @classmethod
    def find_for_process(cls, pid: int) -> Cgroup | None:
        """Return the cgroup of a process; None if its memory is unknown."""
        engine_group, own_group = find_memory_group(pid), find_memory_group(os.getpid())
        if engine_group is None:
            return None
        version, path = engine_group
        in_container = _has_other_root(pid)
        if in_container is None or (not in_container and engine_group == own_group):
            return None
        root = Path(f"/proc/{pid}/root{CGROUP_ROOT}") if in_container else CGROUP_ROOT
        if version == 1:
            root = root / "memory"
        folder = root if in_container else root / path.lstrip("/")
        if not in_container and _has_other_processes(folder, pid):
            return None
        group = cls(folder, version, root)
        return group if group.read().current is not None else None

    def read(self) -> CgroupMemory:
        """Return the present memory of the cgroup. Values that cannot be read are None."""
        if self.version == 1:
            return _read_v1(self.folder)  # memory.stat has the lowest limit of all ancestors
        memory = _read_v2(self.folder)
        limits = [
            memory.limit,
            *(_read_number(ancestor / "memory.max") for ancestor in self._ancestors),
        ]
        return msgspec.structs.replace(memory, limit=_find_min_of_known(limits))


def _has_other_processes(folder: Path, pid: int) -> bool:
    # Shells that started the process tree do not count.
    members = {int(word) for word in _read_text(folder / "cgroup.procs").split() if word.isdigit()}
    tree = read_parent_pids()
    others = members - {pid} - find_descendants({pid}, tree)
    shells = {
        ancestor
        for ancestor in iterate_ancestors(pid, tree)
        if read_command_name(ancestor) in WRAPPER_PROGRAMS
    }
    return not members or not others <= shells


def _has_other_root(pid: int) -> bool | None:
    try:
        engine_root, own_root = os.stat(f"/proc/{pid}/root/"), os.stat("/")
    except OSError:
        return None
    return (engine_root.st_dev, engine_root.st_ino) != (own_root.st_dev, own_root.st_ino)


def _read_v2(folder: Path) -> CgroupMemory:
    stat, events = (
        _read_number_table(folder / "memory.stat"),
        _read_number_table(folder / "memory.events"),
    )
    stalled = _read_pressure(folder / "memory.pressure")
    current, cache, shmem = (
        _read_number(folder / "memory.current"),
        stat.get("file"),
        stat.get("shmem"),
    )
    parts = ("slab", "kernel_stack", "pagetables", "percpu")
    kernel = stat.get("kernel", _sum_known(stat.get(part) for part in parts))  # since Linux 5.18
    freed = stat.get("slab_reclaimable")
    # The kernel's memory includes compressed pages, which ``swap`` has in full (since Linux 5.19).
    uncounted = _sum_known((freed, stat.get("zswap", 0)))
    # Only some mount options charge hugetlb pages to the group.
    known_bytes = _sum_known(
        (stat.get("anon"), cache, kernel, stat.get("sock"), stat.get("hugetlb", 0))
    )
    return CgroupMemory(
        current=current,
        anon=stat.get("anon"),
        shmem=shmem,
        file=_compute_difference(cache, shmem),
        slab=stat.get("slab"),
        kernel=_compute_difference(kernel, uncounted),
        sock=stat.get("sock"),
        other=_compute_difference(current, known_bytes),
        reclaimable=_sum_known((stat.get("active_file"), stat.get("inactive_file"), freed)),
        # A page that was read back keeps its swap slot, so it counts in both.
        swap=_compute_difference(
            _read_number(folder / "memory.swap.current"), stat.get("swapcached", 0)
        ),
        limit=_read_number(folder / "memory.max"),
        oom_kills=events.get("oom_kill"),
        ooms=events.get("oom"),
        throttled=events.get("high"),
        stalled_some_s=stalled.get("some"),
        stalled_full_s=stalled.get("full"),
    )


def _read_v1(folder: Path) -> CgroupMemory:
    # Values named total_* include child groups, and cache includes shared memory.
    stat = _read_number_table(folder / "memory.stat")
    cache, shmem = stat.get("total_cache"), stat.get("total_shmem")
    limits = (_read_number(folder / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit"))
    limit = _find_min_of_known(limits)
    current = _read_number(folder / "memory.usage_in_bytes")
    kernel = _read_number(folder / "memory.kmem.usage_in_bytes")
    return CgroupMemory(
        current=current,
        anon=stat.get("total_rss"),
        shmem=shmem,
        file=_compute_difference(cache, shmem),
        sock=_read_number(
            folder / "memory.kmem.tcp.usage_in_bytes"
        ),  # ``current`` does not include this
        other=_compute_difference(current, _sum_known((stat.get("total_rss"), cache, kernel))),
        reclaimable=_sum_known((stat.get("total_active_file"), stat.get("total_inactive_file"))),
        swap=_compute_difference(_read_number(folder / "memory.memsw.usage_in_bytes"), current),
        limit=limit if limit is not None and limit < UNLIMITED_BYTES else None,
        oom_kills=_read_number_table(folder / "memory.oom_control").get("oom_kill"),
    )


def _read_text(path: Path) -> str:
    # The engine controls this folder, which could contain a file of any size, or a pipe.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            if not S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            return (file.read(MAX_FILE_BYTES) or b"").decode(errors="replace")
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    return parse_whole_number(_read_text(path).strip())


def _sum_known(parts: Iterable[int | None]) -> int | None:
    values = list(parts)
    return None if None in values else sum(value for value in values if value is not None)


def _find_min_of_known(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _compute_difference(total: int | None, subtracted: int | None) -> int | None:
    # The two values were not read together, so the difference could be negative.
    return None if total is None or subtracted is None else max(0, total - subtracted)


def _read_number_table(path: Path) -> dict[str, int]:
    table: dict[str, int] = {}
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if (number := parse_whole_number(value)) is not None:
            table[key] = number
    return table


def _read_pressure(path: Path) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in _read_text(path).splitlines():
        share, _, values = line.partition(" ")
        total = parse_whole_number(values.rpartition("total=")[2])
        if total is not None:
            totals[share] = total / 1e6
    return totals
