"""The processes that this one sees: by psutil, and by /proc for what psutil lacks.

Everything here may be outdated at once, so signals are fenced by the start time of a process
(:class:`ProcessId`). Its arguments and its environment, which a process can write itself, are read
up to a bound; psutil would read and split all of them (docs/decisions/0002-libraries.md).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from plimsoll_api.control_group import MemoryGroup, memory_group
from plimsoll_api.trace import OpenFiles

MAX_ANCESTORS = 64
MAX_WORDS = 64
MAX_LINE = 64 << 10
"""Words and bytes of a command line that are read: a hostile one may have megabytes."""
MAX_DESCRIPTORS = 65_536
"""Open files of one process that are read; a container's limit may be a million."""
MAX_ENVIRONMENT = 1 << 20
"""Bytes of an environment; Linux starts no program with more than 2 MiB by default."""
MAX_THREADS = 8192
"""Threads of one process whose children are read, in every sample: ten times what an engine has."""
TRIES = 3
"""Tries to read the children of a process whose threads come and go."""
OPEN_FILES_PERIOD_S = 15.0
MAX_COUNTED_FILES = 65_536
"""Entries of one process that are counted one by one, on kernels before 6.2; more is unknown."""
ENDED_STATES = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


def read(pid: int, name: str, limit: int = -1) -> bytes:
    """Return what ``/proc/PID/NAME`` holds, up to ``limit`` bytes; raise OSError without it.

    pathlib interns each part of a path, here also the numbers of processes and threads. So the
    interpreter would rebuild its table of interned strings every few hundred samples, which takes a
    megabyte for a moment that the heap may keep.
    """
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        if limit < 0:
            return file.read()
        pieces, left = [], limit
        while left > 0 and (piece := file.read(left)):  # a page at a time
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def first_names(folder: str | Path, limit: int) -> list[str]:
    """Return at most ``limit`` names of a folder that other processes fill. Raises OSError."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, limit)]


class ProcessId(msgspec.Struct, frozen=True):
    """One process, by its PID and its start time, so that a reused PID is never mistaken for it.

    ``started`` is in clock ticks since boot (field 22 of /proc/PID/stat), which no clock moves.
    """

    pid: int
    started: int


def identify(pid: int) -> ProcessId | None:
    """Return the process that has this PID now; None where there is none, or only a zombie."""
    try:
        stat = read(pid, "stat")  # a name is in no certain encoding
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return ProcessId(pid, int(fields[19]))


def lives(process: ProcessId) -> bool:
    """Return whether this process still runs."""
    return identify(process.pid) == process


def age_s(process: ProcessId) -> float:
    """Seconds since the process started."""
    ticks = os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / ticks)


def send(
    process: ProcessId,
    number: int,
    allowed: Callable[[ProcessId], bool] = lambda process: True,
) -> None:
    """Send a signal to this process and no other.

    A process descriptor stays that of its process even if another one gets the PID. Raises
    ``ProcessLookupError`` if it has ended.
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        if lives(process) and allowed(process):
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


class Container(NamedTuple):
    """What the processes of one container share: control group and mount namespace.

    The namespace is None where it may not be read: the process has more capabilities than we.
    """

    cgroup: str
    mounts: int | None

    def is_other_than(self, mine: Container) -> bool:
        """Whether this is another container than ours.

        Two sessions of one machine have control groups of their own, too, but the same mounts.
        """
        return self.cgroup != mine.cgroup and (self.mounts is None or self.mounts != mine.mounts)

    def holds(self, other: Container) -> bool:
        """Whether ``other`` is this container, as far as can be seen."""
        known = self.mounts is not None and other.mounts is not None
        return self.cgroup == other.cgroup and (not known or self.mounts == other.mounts)


def membership(pid: int) -> MemoryGroup | None:
    """Return the process's memory control group; None where that cannot be read."""
    try:
        return memory_group(os.fsdecode(read(pid, "cgroup")))
    except OSError:
        return None


def container_of(pid: int) -> Container | None:
    """Return the container of a process; None where there is no such process."""
    group = membership(pid)
    if group is None:
        return None
    try:
        mounts = os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except OSError:
        mounts = None
    return Container(group[1], mounts)


def is_nested(pid: int) -> bool:
    """Whether the process is in a PID namespace below ours, or gone."""
    try:
        status = read(pid, "status")
    except OSError:
        return True
    # One number for each namespace from ours on. Kernels before 4.1 do not tell.
    return len(status.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()) > 1


def parents() -> dict[int, int]:
    """Return the parent of every process that can be seen and has not ended."""
    found: dict[int, int] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() not in ENDED_STATES:
                    found[pid] = process.ppid()
    return found


def ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """``pid``, its parent and so on."""
    for _ in range(MAX_ANCESTORS):
        if pid <= 0:
            return
        yield pid
        pid = parents.get(pid, 0)


def descendants(pids: set[int], parents: Mapping[int, int]) -> set[int]:
    """Children of ``pids``, their children and so on, without ``pids``."""
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found and child not in pids:
                found.add(child)
                waiting.append(child)
    return found


def children(pid: int) -> list[int] | None:
    """Direct children, those that any of the process's threads started.

    Empty where it has ended, or the kernel does not say; None where its threads changed while they
    were read, or are more than :data:`MAX_THREADS`. psutil scans all of /proc for it.
    """
    folder = f"/proc/{pid}/task"
    for _ in range(TRIES):
        found: list[int] = []
        try:
            tasks = first_names(folder, MAX_THREADS + 1)
        except OSError:
            return found
        if len(tasks) > MAX_THREADS:
            return None
        for task in tasks:
            try:
                found += map(int, read(pid, f"task/{task}/children").split())
            except (OSError, ValueError):
                if os.path.exists(f"{folder}/{task}"):
                    return found
                break  # its children now belong to another thread, maybe to one read before
        else:
            return found
    return None


def cpu_s(pid: int) -> float | None:
    """Seconds that the process and its ended children have computed; None where it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system + times.children_user + times.children_system


def command_line(pid: int) -> list[str]:
    """Return the words of the process's command line, as it was started or as it changed them.

    Empty where unknown; at most :data:`MAX_WORDS`.
    """
    try:
        line = read(pid, "cmdline", MAX_LINE)
    except OSError:
        return []
    return [word.decode(errors="replace") for word in line.split(b"\0", MAX_WORDS)[:MAX_WORDS]]


def environment(pid: int, name: str) -> str | None:
    """Return a variable that the process was started with.

    None where it has none or may not be read.
    """
    try:
        entries = b"\0" + read(pid, "environ", MAX_ENVIRONMENT)
    except OSError:
        return None
    _, begin, rest = entries.partition(b"\0" + name.encode() + b"=")
    return rest.partition(b"\0")[0].decode(errors="replace") if begin else None


def command_name(pid: int) -> str:
    """Return the kernel's name of the process, at most 15 characters; empty where it has ended."""
    try:
        return read(pid, "comm").decode(errors="replace").strip()
    except OSError:
        return ""


class OpenFilesReader:
    """Reads at intervals, and returns the newest reading in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        self._newest: OpenFiles | None = None

    def read(self, processes: Callable[[], Mapping[int, str]]) -> OpenFiles | None:
        """Return the process that is nearest to its limit, of those that can be read.

        ``processes`` gives the names of the engine's processes by PID. None if no process can be
        read.
        """
        now = self._clock()
        if now >= self._next:
            self._next = now + OPEN_FILES_PERIOD_S
            self._newest = nearest(processes())
        return self._newest


def nearest(processes: Mapping[int, str]) -> OpenFiles | None:
    """Return the process with the largest share of its limit in use; None if none can be read."""
    found = []
    for pid, name in processes.items():
        count, limit = _open_files(f"/proc/{pid}/fd"), _limit(pid)
        if count is not None and limit is not None:
            found.append(OpenFiles(process=name, open=count, limit=limit))
    return max(found, key=lambda one: one.ratio, default=None)


def _open_files(folder: str) -> int | None:
    try:
        # Since Linux 6.2 the size of this folder is the number of its entries.
        if size := os.stat(folder).st_size:
            return size
        with os.scandir(folder) as entries:
            count = sum(1 for _ in itertools.islice(entries, MAX_COUNTED_FILES + 1))
    except OSError:
        return None
    return count if count <= MAX_COUNTED_FILES else None


def _limit(pid: int) -> int | None:
    """Return the soft limit; None where there is none, or it cannot be read."""
    try:
        soft, _ = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
    except (psutil.Error, OSError):
        return None
    return soft if soft > 0 else None
