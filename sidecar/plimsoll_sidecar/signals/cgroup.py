"""Memory of the engine's control group, version 1 or 2.

In a pod the engine is in another container: its group is what *its* ``/sys/fs/cgroup`` shows,
reached through ``/proc/PID/root`` (same UID). Outside of a container the path in
``/proc/PID/cgroup`` leads there. A group that the engine shares with the supervisor says nothing
about the engine and counts as unknown. So does whatever else is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG

import msgspec

from plimsoll_api.units import whole_number
from plimsoll_sidecar.signals.process_table import membership

ROOT = Path("/sys/fs/cgroup")
MAX_BYTES = 1 << 16
"""Bytes of one file; memory.stat has 2 KiB."""
UNLIMITED = 1 << 60
"""Version 1 writes ``no limit`` as the largest multiple of a page, near 2**63."""


class CgroupMemory(msgspec.Struct, frozen=True):
    """Memory of a control group, in bytes.

    ``oom_kills`` counts processes that the kernel killed in the group, ``ooms`` how often it ran
    out of memory, ``throttled`` how often it was held back above ``memory.high``.

    ``stalled_some_s`` and ``stalled_full_s`` are its pressure stall information: how long some or
    all of its tasks waited for memory, since the group began. Version 1 has none of these three.

    ``swap`` is what the group has in swap and not in memory as well. The kernel does not say which
    kind of page it was; nearly all of it is anonymous.

    ``file`` is without shared memory, and ``kernel`` without what can be reclaimed (version 1 does
    not tell it apart). ``sock`` are buffers of sockets. ``other`` is charged to the group and in no
    figure of the kernel's, such as the unmapped parts of transparent huge pages. ``reclaimable`` is
    what the kernel takes back before it kills. ``limit`` is the least on the way up, as far as the
    groups above can be seen.
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
        """Share of the limit that is in use and cannot be reclaimed; None where it is unknown."""
        if self.current is None or self.reclaimable is None or not self.limit:
            return None
        return max(0, self.current - self.reclaimable) / self.limit


class Cgroup:
    """The memory files of one process's group."""

    def __init__(self, folder: Path, version: int, root: Path | None = None) -> None:
        """``root`` is the highest group that can be seen; by default it is this one."""
        self.folder = folder
        self.version = version
        above = folder.parents if root is not None and folder.is_relative_to(root) else ()
        self._above = [one for one in above if root is not None and one.is_relative_to(root)]

    @classmethod
    def of(cls, pid: int) -> Cgroup | None:
        """Return the group of ``pid``, None where it cannot be found or is the supervisor's own."""
        theirs, ours = membership(pid), membership(os.getpid())
        if theirs is None:
            return None
        version, path = theirs
        in_container = _another_root(pid)
        if in_container is None or (not in_container and theirs == ours):
            return None
        root = Path(f"/proc/{pid}/root{ROOT}") if in_container else ROOT
        if version == 1:
            root = root / "memory"
        folder = root if in_container else root / path.lstrip("/")
        group = cls(folder, version, root)
        return group if group.read().current is not None else None

    def read(self) -> CgroupMemory:
        """Return the group's files at this instant; what cannot be read is None."""
        if self.version == 1:
            return _version1(self.folder)  # its stat has the least limit
        found = _version2(self.folder)
        limits = [found.limit, *(_number(one / "memory.max") for one in self._above)]
        return msgspec.structs.replace(found, limit=_least(limits))


def _another_root(pid: int) -> bool | None:
    """Whether the process has another root file system; None where that may not be seen."""
    try:
        theirs, ours = os.stat(f"/proc/{pid}/root/"), os.stat("/")
    except OSError:
        return None
    return (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)


def _version2(folder: Path) -> CgroupMemory:
    stat, events = _table(folder / "memory.stat"), _table(folder / "memory.events")
    stalled = _pressure(folder / "memory.pressure")
    current, cache, shmem = _number(folder / "memory.current"), stat.get("file"), stat.get("shmem")
    parts = ("slab", "kernel_stack", "pagetables", "percpu")
    kernel = stat.get("kernel", _sum(stat.get(one) for one in parts))  # since Linux 5.18
    freed = stat.get("slab_reclaimable")
    # Huge pages of hugetlb are charged to the group on some mounts alone.
    known = _sum((stat.get("anon"), cache, kernel, stat.get("sock"), stat.get("hugetlb", 0)))
    return CgroupMemory(
        current=current,
        anon=stat.get("anon"),
        shmem=shmem,
        file=_less(cache, shmem),
        slab=stat.get("slab"),
        kernel=_less(kernel, freed),
        sock=stat.get("sock"),
        other=_less(current, known),
        reclaimable=_sum((stat.get("active_file"), stat.get("inactive_file"), freed)),
        # A page that was read back keeps its place in swap, and counts in both.
        swap=_less(_number(folder / "memory.swap.current"), stat.get("swapcached", 0)),
        limit=_number(folder / "memory.max"),
        oom_kills=events.get("oom_kill"),
        ooms=events.get("oom"),
        throttled=events.get("high"),
        stalled_some_s=stalled.get("some"),
        stalled_full_s=stalled.get("full"),
    )


def _version1(folder: Path) -> CgroupMemory:
    """``total_*`` includes groups below; ``cache`` is file and shared memory together."""
    stat = _table(folder / "memory.stat")
    cache, shmem = stat.get("total_cache"), stat.get("total_shmem")
    limits = (_number(folder / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit"))
    limit = _least(limits)
    current = _number(folder / "memory.usage_in_bytes")
    kernel = _number(folder / "memory.kmem.usage_in_bytes")
    return CgroupMemory(
        current=current,
        anon=stat.get("total_rss"),
        shmem=shmem,
        file=_less(cache, shmem),
        sock=_number(folder / "memory.kmem.tcp.usage_in_bytes"),  # not a part of ``current``
        other=_less(current, _sum((stat.get("total_rss"), cache, kernel))),
        reclaimable=_sum((stat.get("total_active_file"), stat.get("total_inactive_file"))),
        swap=_less(_number(folder / "memory.memsw.usage_in_bytes"), current),
        limit=limit if limit is not None and limit < UNLIMITED else None,
        oom_kills=_table(folder / "memory.oom_control").get("oom_kill"),
    )


def _read(path: Path) -> str:
    """Return the file's text; empty where it cannot be read.

    The folder is in the engine's mount namespace: a pipe there could block the reader, and a file
    there can have any size.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            if not S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            return (file.read(MAX_BYTES) or b"").decode(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    return whole_number(_read(path).strip())


def _sum(parts: Iterable[int | None]) -> int | None:
    """Return the sum, unknown if any part of it is."""
    known = list(parts)
    return None if None in known else sum(one for one in known if one is not None)


def _least(limits: Iterable[int | None]) -> int | None:
    return min((one for one in limits if one is not None), default=None)


def _less(whole: int | None, part: int | None) -> int | None:
    """Return a difference, never negative: the two files are not read at the same instant."""
    return None if whole is None or part is None else max(0, whole - part)


def _table(path: Path) -> dict[str, int]:
    table: dict[str, int] = {}
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if (number := whole_number(value)) is not None:
            table[key] = number
    return table


def _pressure(path: Path) -> dict[str, float]:
    """``total`` of each line in seconds; none where the kernel was built or started without PSI."""
    found: dict[str, float] = {}
    for line in _read(path).splitlines():
        share, _, values = line.partition(" ")
        total = whole_number(values.rpartition("total=")[2])
        if total is not None:
            found[share] = total / 1e6
    return found
