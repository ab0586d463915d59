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
    read_cpu_s,
)

# The memory of more processes is unknown: a fork bomb in the engine's container must not stop the
# sampler.
MAX_PROCESSES = 256


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
    for one of them.
    """

    def __init__(self) -> None:
        self._reported: dict[ProcessId, ProcessMemory] = {}
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
        self._reported = named

    @property
    def main_process(self) -> ProcessId | None:
        """The running frontend, or else another running process; None if no process runs."""
        alive = [p for p in self._reported if is_running(p)]
        alive.sort(key=lambda p: self._reported[p].role is not Role.FRONTEND)
        return alive[0] if alive else None

    @property
    def frontend_lives(self) -> bool | None:
        """Whether the frontend is running; None if no frontend was reported."""
        frontends = [p for p, process in self._reported.items() if process.role is Role.FRONTEND]
        return any(is_running(p) for p in frontends) if frontends else None

    def read(self) -> Host:
        """Return the sums over all processes; unknown if any process could not be read."""
        living = self._find_running()
        if living is None:
            return Host()
        if not living:
            return Host(processes=0 if self._reported else None)
        read = {pid: identify(pid) for pid in living} | {p.pid: p for p in self._reported}
        sizes = {
            pid: _limit_anonymous_bytes(read_resident_memory(pid), process.private)
            for pid, process in living.items()
        }
        changed = any(identify(pid) != read[pid] for pid in living)
        if changed or any(size is None for size in sizes.values()):
            return Host(processes=len(sizes))
        known_sizes = {pid: size for pid, size in sizes.items() if size is not None}
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
                    living[pid].label,
                    size.anon,
                    size.shmem,
                    size.swap,
                    sum_known((living[pid].malloc_in_use, living[pid].python_objects)),
                    living[pid].malloc_retained,
                )
                for pid, size in known_sizes.items()
                if living[pid].name != STANDBY_PROCESS_NAME
            ],
        )

    def get_labels(self) -> dict[int, str]:
        """Return the labels of the running processes by PID; empty if not all are known."""
        return {pid: process.label for pid, process in (self._find_running() or {}).items()}

    def read_helpers_cpu_s(self) -> float | None:
        """Return the CPU seconds of all processes except the frontend, or of the frontend alone.

        None if a process cannot be read.
        """
        living = self._find_running()
        if living is None:
            return None
        helpers = [pid for pid, p in living.items() if p.role is not Role.FRONTEND] or list(living)
        spent = [read_cpu_s(pid) for pid in helpers]
        known_times = [s for s in spent if s is not None]
        return sum(known_times) if len(known_times) == len(spent) and any(known_times) else None

    def _find_running(self) -> dict[int, ProcessMemory] | None:
        named = {p.pid: process for p, process in self._reported.items() if is_running(p)}
        processes = dict(named)
        waiting = list(named)
        while waiting:
            parent = waiting.pop()
            started = read_children(parent)
            if started is None or len(processes) + len(started) > MAX_PROCESSES:
                return None
            for child in started:
                # A zombie has no memory, and stays until its parent reads its exit status.
                if child not in processes and identify(child) is not None:
                    # A child of a standby is idle, too, and shares the standby's pages.
                    waits = processes[parent].name == STANDBY_PROCESS_NAME
                    processes[child] = ProcessMemory(
                        Role.OTHER,
                        child,
                        name=STANDBY_PROCESS_NAME if waits else None,
                        private=0 if waits else None,
                    )
                    waiting.append(child)
        return processes


def _limit_anonymous_bytes(
    size: ResidentMemory | None, max_bytes: int | None
) -> ResidentMemory | None:
    if size is None or max_bytes is None:
        return size
    return msgspec.structs.replace(size, anon=min(size.anon, max_bytes))


def read_resident_memory(pid: int) -> ResidentMemory | None:
    """Return the memory of the process; None if it does not exist or is a zombie."""
    values: dict[bytes, int] = {}
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith((b"Rss", b"VmSwap:", b"HugetlbPages:")):
                    key, size = line.split()[:2]
                    values[key] = int(size) * 1024
    except (OSError, ValueError):
        return None
    try:
        return ResidentMemory(
            values[b"RssAnon:"],
            values[b"RssFile:"],
            values[b"RssShmem:"],
            values.get(b"VmSwap:"),
            values.get(b"HugetlbPages:"),
        )
    except KeyError:
        return None


def has_huge_pages(meminfo_path: str = "/proc/meminfo") -> bool:
    """Report whether this node has a pool of huge pages; most nodes have none."""
    try:
        with open(meminfo_path, "rb") as file:
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
