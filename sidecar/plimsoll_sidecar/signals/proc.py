"""Resident memory of the engine's processes, from ``/proc/PID/status``.

Readable across UIDs, and cheap: tens of microseconds a process. A process that vanishes while it is
read makes the answer unknown for this sample, never smaller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from plimsoll_api.admin import ProcessMemory, Role
from plimsoll_sidecar.act.process import ProcessId, identify
from plimsoll_sidecar.trace import Host, RoleRss

MAX_PROCESSES = 256
"""An engine has a handful; a fork bomb beside it must not stop the sampler."""


class Resident(msgspec.Struct, frozen=True):
    """Bytes of one process, by kind of page."""

    anon: int
    file: int
    shmem: int

    @property
    def total(self) -> int:
        return self.anon + self.file + self.shmem


class Processes:
    """The processes of one engine: those that it names, and their descendants.

    What the engine named last is remembered with its start times, so that it can be read while the
    engine does not answer, and a PID that was given to another process is not taken for it.
    """

    def __init__(self) -> None:
        self._named: dict[ProcessId, Role] = {}

    def name(self, processes: Iterable[ProcessMemory]) -> None:
        """Takes over what the engine says. A PID of our own comes from another PID namespace."""
        own = _ancestors(os.getpid())
        named: dict[ProcessId, Role] = {}
        for process in processes:
            identity = identify(process.pid) if process.pid not in own else None
            if identity is not None:
                named[identity] = process.role
        self._named = named

    @property
    def first(self) -> int | None:
        """A PID of the engine that is alive; the frontend's where it is known."""
        alive = [p for p in self._named if identify(p.pid) == p]
        alive.sort(key=lambda p: self._named[p] is not Role.FRONTEND)
        return alive[0].pid if alive else None

    def read(self) -> Host:
        """Sums over all processes; everything unknown when one of them could not be read."""
        roles = self._living()
        if not roles:
            return Host(processes=0 if self._named else None)
        sizes = {pid: resident(pid) for pid in roles}
        if any(size is None for size in sizes.values()):
            return Host(processes=len(sizes))
        known = {pid: size for pid, size in sizes.items() if size is not None}
        return Host(
            rss_anon=sum(size.anon for size in known.values()),
            rss_file=sum(size.file for size in known.values()),
            rss_shmem=sum(size.shmem for size in known.values()),
            processes=len(known),
            by_process=[
                RoleRss(roles[pid].value, size.anon, size.shmem) for pid, size in known.items()
            ],
        )

    def _living(self) -> dict[int, Role]:
        named = {p.pid: role for p, role in self._named.items() if identify(p.pid) == p}
        found = dict(named)
        waiting = list(named)
        while waiting and len(found) < MAX_PROCESSES:
            for child in children(waiting.pop()):
                if child not in found:
                    found[child] = Role.OTHER
                    waiting.append(child)
        return found


def resident(pid: int) -> Resident | None:
    """The process's memory now; None where there is no such process, or only a zombie."""
    values: dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("Rss"):
                    key, size = line.split()[:2]
                    values[key] = int(size) * 1024
    except (OSError, ValueError):
        return None
    try:
        return Resident(values["RssAnon:"], values["RssFile:"], values["RssShmem:"])
    except KeyError:
        return None


def children(pid: int) -> list[int]:
    """Direct children, those that any of the process's threads started; empty where unknown."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except (OSError, ValueError):
        return found
    return found


def proportional(pid: int) -> dict[str, int] | None:
    """``smaps_rollup`` in bytes by its own field names, such as ``Pss`` and ``Private_Dirty``.

    Only on request: the kernel holds the process's memory map locked while it walks every page,
    which stalls an engine with a large heap. Needs the same UID; None where it cannot be read.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        return {
            key.rstrip(":"): int(size) * 1024 for key, size, *_ in (line.split() for line in lines)
        }
    except (OSError, ValueError):
        return None


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found
