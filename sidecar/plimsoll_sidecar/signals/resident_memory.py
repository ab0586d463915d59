"""Read the resident memory of the engine's processes from ``/proc/PID/status``.

If a process ends while it is read, or its PID is reused, the result is unknown, never smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import psutil

from plimsoll_api.admin import STANDBY_PROCESS_NAME, ProcessMemory, Role
from plimsoll_api.trace import Host, RoleRss
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    identify,
    is_running,
    read_children,
    read_proc_file,
    read_process,
)

# The memory of more processes is unknown: a fork bomb in the engine's container must not stop the
# sampler.
MAX_PROCESSES = 256
# Lines of /proc/PID/status, as fields of ResidentMemory in its order. The name of the process in
# the first line cannot contain a line break.
SIZE_KEYS = (b"\nRssAnon:", b"\nRssFile:", b"\nRssShmem:", b"\nVmSwap:", b"\nHugetlbPages:")


class ResidentMemory(msgspec.Struct, frozen=True):
    """Resident memory of one process by kind of page, in bytes; None if unknown."""

    anon: int
    file: int
    shmem: int
    # Anonymous memory in swap.
    swap: int | None = None
    # The other values do not include huge pages from a pool.
    hugetlb: int | None = None

    @property
    def total_bytes(self) -> int:
        """Sum of all kinds of resident pages."""
        return self.anon + self.file + self.shmem


class EngineProcessTable:
    """Processes of one engine: those that it reports, and their descendants.

    They can be read while the engine does not answer. A process that reuses a PID is not mistaken
    for one of them. All other results belong to the last :meth:`read`.
    """

    def __init__(self) -> None:
        self._reported: dict[ProcessId, ProcessMemory] = {}
        self._running: list[ProcessId] = []
        self._family: dict[ProcessId, ProcessMemory] | None = {}
        self._cpu_s: dict[ProcessId, float] = {}
        self._has_huge_pages = has_huge_pages()
        own = psutil.Process()
        self._supervisor_pids = {own.pid, *(ancestor.pid for ancestor in own.parents())}

    def set_processes(self, processes: Iterable[ProcessMemory]) -> None:
        """Store the reported processes, without the supervisor and its ancestors."""
        named: dict[ProcessId, ProcessMemory] = {}
        for process in processes:
            # Such a PID comes from another PID namespace.
            identity = identify(process.pid) if process.pid not in self._supervisor_pids else None
            if identity is not None:
                named[identity] = process
        self._reported, self._running = named, list(named)

    @property
    def main_process(self) -> ProcessId | None:
        """The running frontend, or else another running process; None if no process runs."""
        return min(
            self._running,
            key=lambda process: self._reported[process].role is not Role.FRONTEND,
            default=None,
        )

    @property
    def frontend_lives(self) -> bool | None:
        """Whether the frontend is running; None if no frontend was reported."""
        frontends = [p for p, process in self._reported.items() if process.role is Role.FRONTEND]
        return any(p in self._running for p in frontends) if frontends else None

    def read(self) -> Host:
        """Return the sums over all processes; unknown if any process could not be read."""
        self._running = [process for process in self._reported if is_running(process)]
        family = self._family = self._find_family()
        if family is None:
            return Host()
        if not family:
            return Host(processes=0 if self._reported else None)
        sizes = {
            process: _limit_anonymous_bytes(read_resident_memory(process.pid), reported.private)
            for process, reported in family.items()
        }
        readings = [read_process(process.pid) for process in family]
        self._cpu_s = dict(reading for reading in readings if reading is not None)
        has_changed = family.keys() != self._cpu_s.keys()
        known_sizes = {process: size for process, size in sizes.items() if size is not None}
        if has_changed or len(known_sizes) < len(sizes):
            return Host(processes=len(sizes))
        return Host(
            rss_anon=sum(size.anon for size in known_sizes.values()),
            rss_file=sum(size.file for size in known_sizes.values()),
            rss_shmem=sum(size.shmem for size in known_sizes.values()),
            swap=sum_known(size.swap for size in known_sizes.values()),
            hugetlb=sum_known(size.hugetlb for size in known_sizes.values())
            if self._has_huge_pages
            else None,
            processes=len(known_sizes),
            by_process=[  # the ledger includes the memory of a standby
                RoleRss(
                    family[process].label,
                    size.anon,
                    size.shmem,
                    size.swap,
                    sum_known((family[process].malloc_in_use, family[process].python_objects)),
                    family[process].malloc_retained,
                )
                for process, size in known_sizes.items()
                if family[process].name != STANDBY_PROCESS_NAME
            ],
        )

    def get_labels(self) -> dict[int, str]:
        """Return the labels of the running processes by PID; empty if not all are known."""
        return {process.pid: reported.label for process, reported in (self._family or {}).items()}

    def sum_helpers_cpu_s(self) -> float | None:
        """Return the CPU seconds of all processes except the frontend, or of the frontend alone.

        None if a process could not be read.
        """
        family = self._family or {}
        helpers = [p for p, reported in family.items() if reported.role is not Role.FRONTEND]
        spent = [self._cpu_s.get(process) for process in helpers or family]
        known_times = [s for s in spent if s is not None]
        return sum(known_times) if len(known_times) == len(spent) and any(known_times) else None

    def _find_family(self) -> dict[ProcessId, ProcessMemory] | None:
        # The running processes and their descendants; None if they are not all known.
        family = {process: self._reported[process] for process in self._running}
        pids = {process.pid for process in family}
        waiting = list(family.items())
        while waiting:
            parent, reported = waiting.pop()
            started = read_children(parent.pid)
            unlisted = None if started is None else [pid for pid in started if pid not in pids]
            if unlisted is None or len(family) + len(unlisted) > MAX_PROCESSES:
                return None
            for pid in unlisted:
                # A zombie has no memory, and stays until its parent reads its exit status.
                child = identify(pid)
                if child is None:
                    continue
                # A child of a standby is idle, too, and shares the standby's pages.
                waits = reported.name == STANDBY_PROCESS_NAME
                family[child] = ProcessMemory(
                    Role.OTHER,
                    pid,
                    name=STANDBY_PROCESS_NAME if waits else None,
                    private=0 if waits else None,
                )
                pids.add(pid)
                waiting.append((child, family[child]))
        return family


def _limit_anonymous_bytes(
    size: ResidentMemory | None, max_bytes: int | None
) -> ResidentMemory | None:
    if size is None or max_bytes is None:
        return size
    return msgspec.structs.replace(size, anon=min(size.anon, max_bytes))


def read_resident_memory(pid: int) -> ResidentMemory | None:
    """Return the memory of the process; None if it does not exist or is a zombie."""
    try:
        status = read_proc_file(pid, "status")
    except OSError:
        return None
    anon, file, shmem, swap, hugetlb = (_read_size(status, key) for key in SIZE_KEYS)
    if anon is None or file is None or shmem is None:
        return None
    return ResidentMemory(anon, file, shmem, swap, hugetlb)


def _read_size(status: bytes, key: bytes) -> int | None:
    begin = status.find(key)
    if begin < 0:
        return None
    begin += len(key)
    return int(status[begin : status.index(b"kB", begin)]) * 1024


def has_huge_pages() -> bool:
    """Report whether this node has a pool of huge pages; most nodes have none."""
    try:
        with open("/proc/meminfo", "rb") as file:
            match = re.search(rb"^Hugetlb: +(\d+)", file.read(1 << 16), re.M)
    except OSError:
        return False
    return match is not None and int(match[1]) > 0


def sum_known(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of ``sizes``; None if any is unknown."""
    result = 0
    for size in sizes:
        if size is None:
            return None
        result += size
    return result
