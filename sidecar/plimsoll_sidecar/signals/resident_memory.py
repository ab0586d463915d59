"""Resident memory of the engine's processes, from ``/proc/PID/status``.

Readable across UIDs, and cheap: tens of microseconds a process. A process that vanishes while it is
read, or whose PID another process has by then, makes the answer unknown for this sample, never
smaller. Files are read as bytes: a process may give itself a name in any encoding, or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import psutil

from plimsoll_api.admin import STANDBY, ProcessMemory, Role
from plimsoll_api.trace import Host, RoleRss
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    children,
    cpu_s,
    identify,
    lives,
)

MAX_PROCESSES = 256
"""An engine has a handful; a fork bomb beside it must not stop the sampler. Beyond it the sum is
unknown."""


class Resident(msgspec.Struct, frozen=True):
    """Bytes of one process, by kind of page."""

    anon: int
    file: int
    shmem: int
    swap: int | None = None
    """Anonymous memory in swap; None where the kernel does not say."""
    hugetlb: int | None = None
    """Huge pages of a pool (hugetlb), which are in no other figure."""

    @property
    def total(self) -> int:
        """Resident bytes of all kinds."""
        return self.anon + self.file + self.shmem


class Processes:
    """The processes of one engine: those that it names, and their descendants.

    What the engine named last is remembered with its start times, so that it can be read while the
    engine does not answer, and a PID that was given to another process is not taken for it.
    """

    def __init__(self) -> None:
        self._named: dict[ProcessId, ProcessMemory] = {}
        self._pool = has_huge_pages()
        own = psutil.Process()
        self._own = {own.pid, *(ancestor.pid for ancestor in own.parents())}

    def name(self, processes: Iterable[ProcessMemory]) -> None:
        """Take over what the engine says. A PID of our own comes from another PID namespace."""
        named: dict[ProcessId, ProcessMemory] = {}
        for process in processes:
            identity = identify(process.pid) if process.pid not in self._own else None
            if identity is not None:
                named[identity] = process
        self._named = named

    @property
    def first(self) -> ProcessId | None:
        """A living process of the engine; the frontend where it is known."""
        alive = [p for p in self._named if lives(p)]
        alive.sort(key=lambda p: self._named[p].role is not Role.FRONTEND)
        return alive[0] if alive else None

    @property
    def frontend_lives(self) -> bool | None:
        """Whether the process that the others end with is alive; None where none was named."""
        frontends = [p for p, one in self._named.items() if one.role is Role.FRONTEND]
        return any(lives(p) for p in frontends) if frontends else None

    def read(self) -> Host:
        """Sum over all processes; everything unknown when one of them could not be read."""
        living = self._living()
        if living is None:
            return Host()
        if not living:
            return Host(processes=0 if self._named else None)
        read = {pid: identify(pid) for pid in living} | {p.pid: p for p in self._named}
        sizes = {pid: _own(resident(pid), process.private) for pid, process in living.items()}
        changed = any(identify(pid) != read[pid] for pid in living)
        if changed or any(size is None for size in sizes.values()):
            return Host(processes=len(sizes))
        known = {pid: size for pid, size in sizes.items() if size is not None}
        return Host(
            rss_anon=sum(size.anon for size in known.values()),
            rss_file=sum(size.file for size in known.values()),
            rss_shmem=sum(size.shmem for size in known.values()),
            swap=total(size.swap for size in known.values()),
            hugetlb=total(size.hugetlb for size in known.values()) if self._pool else None,
            processes=len(known),
            by_process=[  # what a standby has grown by is in the ledger
                RoleRss(living[pid].label, size.anon, size.shmem, size.swap)
                for pid, size in known.items()
                if living[pid].name != STANDBY
            ],
        )

    def names(self) -> dict[int, str]:
        """Return what the living processes are called, by PID; empty where not all are known."""
        return {pid: process.label for pid, process in (self._living() or {}).items()}

    def helpers_cpu_s(self) -> float | None:
        """Return the processor time of all but the frontend, with that of ended children.

        Of everything where there is only the frontend. None where one of them cannot be read.
        """
        living = self._living()
        if living is None:
            return None
        helpers = [pid for pid, p in living.items() if p.role is not Role.FRONTEND] or list(living)
        spent = [cpu_s(pid) for pid in helpers]
        known = [s for s in spent if s is not None]
        return sum(known) if len(known) == len(spent) and any(known) else None

    def _living(self) -> dict[int, ProcessMemory] | None:
        """Return the processes by PID; None where not all of them can be known."""
        named = {p.pid: one for p, one in self._named.items() if lives(p)}
        found = dict(named)
        waiting = list(named)
        while waiting:
            parent = waiting.pop()
            started = children(parent)
            if started is None or len(found) + len(started) > MAX_PROCESSES:
                return None
            for child in started:
                # A zombie has no memory, and stays for as long as its parent does not care.
                if child not in found and identify(child) is not None:
                    # What a standby forks does nothing either: its pages are the standby's.
                    waits = found[parent].name == STANDBY
                    found[child] = ProcessMemory(
                        Role.OTHER,
                        child,
                        name=STANDBY if waits else None,
                        private=0 if waits else None,
                    )
                    waiting.append(child)
        return found


def _own(size: Resident | None, private: int | None) -> Resident | None:
    """Return what is the process's alone, where the engine says it: other pages count elsewhere."""
    if size is None or private is None:
        return size
    return msgspec.structs.replace(size, anon=min(size.anon, private))


def resident(pid: int) -> Resident | None:
    """Return the process's memory now; None where there is no such process, or only a zombie."""
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
        return Resident(
            values[b"RssAnon:"],
            values[b"RssFile:"],
            values[b"RssShmem:"],
            values.get(b"VmSwap:"),
            values.get(b"HugetlbPages:"),
        )
    except KeyError:
        return None


def has_huge_pages(memory: str = "/proc/meminfo") -> bool:
    """Return whether this node keeps a pool of huge pages; most have none."""
    try:
        with open(memory, "rb") as file:
            found = re.search(rb"^Hugetlb: +(\d+)", file.read(1 << 16), re.M)
    except OSError:
        return False
    return found is not None and int(found[1]) > 0


def total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum, unknown if any part of it is."""
    result = 0
    for size in sizes:
        if size is None:
            return None
        result += size
    return result
