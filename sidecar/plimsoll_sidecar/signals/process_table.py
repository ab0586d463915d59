"""Read the processes of this PID namespace, with psutil or from /proc where psutil lacks a value.

A result may be outdated as soon as it is returned, so a signal is sent only to a process with a
known start time (:class:`ProcessId`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from plimsoll_api.control_group import MemoryGroup, parse_memory_group
from plimsoll_api.trace import OpenFiles

MAX_ANCESTORS = 64
READ_CHUNK_BYTES = 8 << 10
MAX_COMMAND_WORDS = 64
# A process can change its arguments, which may have megabytes. psutil would read all of them
# (docs/decisions/0002-libraries.md).
MAX_COMMAND_BYTES = 64 << 10
# A container may allow a million.
MAX_DESCRIPTORS = 65_536
# Linux allows 2 MiB by default.
MAX_ENVIRONMENT_BYTES = 1 << 20
# Engines have a tenth as many.
MAX_THREADS = 8192
# The threads of a process may start and end while its children are read.
MAX_CHILDREN_ATTEMPTS = 3
OPEN_FILES_PERIOD_S = 15.0
# Kernels before 6.2 do not count open files. They are counted one by one, up to this number.
MAX_COUNTED_FILES = 65_536
ENDED_STATES = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def read_proc_file(pid: int, name: str, max_bytes: int = sys.maxsize) -> bytes:
    """Return up to ``max_bytes`` bytes of ``/proc/PID/NAME``, or all. Raises OSError."""
    # pathlib would intern the numbers of processes and threads. The interpreter would rebuild its
    # table of interned strings every few hundred samples, and the heap may keep the megabyte.
    # open() would make five more system calls, and these files are read some fifty times a sample.
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    try:
        pieces, remaining = [], max_bytes
        while piece := os.read(descriptor, min(remaining, READ_CHUNK_BYTES)):  # a page at a time
            pieces.append(piece)
            remaining -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def list_entry_names(folder: str | Path, max_entries: int) -> list[str]:
    """Return at most ``max_entries`` names of entries in a folder. Raises OSError."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, max_entries)]


class ProcessId(msgspec.Struct, frozen=True):
    """Identity of one process: PID and start time, because PIDs are reused.

    ``started`` is in clock ticks since boot (field 22 of /proc/PID/stat).
    """

    pid: int
    started: int


class ProcessReading(NamedTuple):
    """A process that is no zombie, and the CPU seconds of it and its ended children."""

    process: ProcessId
    cpu_s: float


def read_process(pid: int) -> ProcessReading | None:
    """Return the process with this PID; None if it does not exist or is a zombie."""
    fields = _read_stat_fields(pid)
    if fields is None:
        return None
    return ProcessReading(
        ProcessId(pid, int(fields[19])), sum(map(int, fields[11:15])) / _TICKS_PER_S
    )


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the process with this PID; None if it has ended or is a zombie."""
    fields = _read_stat_fields(pid)
    return None if fields is None else ProcessId(pid, int(fields[19]))


def _read_stat_fields(pid: int) -> list[bytes] | None:
    # The fields from the third on, because the second is a name in any encoding.
    try:
        stat = read_proc_file(pid, "stat")
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 1 :].split()
    return None if len(fields) < 20 or fields[0] in (b"Z", b"X") else fields


def is_running(process: ProcessId) -> bool:
    """Report whether this process still runs."""
    return identify(process.pid) == process


def compute_age_s(process: ProcessId) -> float:
    """Return the seconds since the process started."""
    boottime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, boottime_s - process.started / _TICKS_PER_S)


def send_signal(
    process: ProcessId,
    signal_number: int,
    is_allowed: Callable[[ProcessId], bool] = lambda process: True,
) -> None:
    """Send a signal to this process, never to a process that reuses its PID.

    If ``is_allowed`` returns False, no signal is sent. Raises ``ProcessLookupError`` if the process
    has ended.
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        if is_running(process) and is_allowed(process):
            signal.pidfd_send_signal(descriptor, signal_number)
    finally:
        os.close(descriptor)


class Container(NamedTuple):
    """A container, identified by the cgroup and the mount namespace of its processes.

    ``mounts`` is the inode of the mount namespace; None if the supervisor cannot read it.
    """

    cgroup: str
    mounts: int | None

    def is_different_from(self, other: Container) -> bool:
        """Report whether ``other`` is another container.

        Login sessions of one machine have different cgroups too, but the same mounts.
        """
        return self.cgroup != other.cgroup and (self.mounts is None or self.mounts != other.mounts)

    def is_same_as(self, other: Container) -> bool:
        """Report whether ``other`` is this container. An unknown mount namespace is ignored."""
        are_mounts_known = self.mounts is not None and other.mounts is not None
        return self.cgroup == other.cgroup and (not are_mounts_known or self.mounts == other.mounts)


def find_memory_group(pid: int) -> MemoryGroup | None:
    """Return the memory cgroup of the process; None if it cannot be read."""
    try:
        return parse_memory_group(os.fsdecode(read_proc_file(pid, "cgroup")))
    except OSError:
        return None


def find_container(pid: int) -> Container | None:
    """Return the container of the process; None if the process does not exist."""
    group = find_memory_group(pid)
    if group is None:
        return None
    try:
        mounts = os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except OSError:
        mounts = None
    return Container(_remove_nested_groups(group.path), mounts)


def _remove_nested_groups(path: str) -> str:
    # A supervisor in a cgroup namespace sees another container of its pod as /../NAME, and groups
    # that the container has made, for example for the workers of Ray, below it.
    parts = path.split("/", 3)
    return "/".join(parts[:3]) if parts[1:2] == [".."] and parts[2:3] != [".."] else path


def is_in_nested_namespace(pid: int) -> bool:
    """Report whether the process has ended, or is in a nested PID namespace."""
    try:
        status = read_proc_file(pid, "status")
    except OSError:
        return True
    # One PID for each namespace from this one down; kernels before 4.1 have no such line.
    return len(status.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()) > 1


def read_parent_pids() -> dict[int, int]:
    """Return the parent PIDs of all visible processes that have not ended, by PID."""
    parent_pids: dict[int, int] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() not in ENDED_STATES:
                    parent_pids[pid] = process.ppid()
    return parent_pids


def iterate_ancestors(pid: int, parent_pids: Mapping[int, int]) -> Iterator[int]:
    """Yield ``pid``, its parent, and each further ancestor."""
    for _ in range(MAX_ANCESTORS):
        if pid <= 0:
            return
        yield pid
        pid = parent_pids.get(pid, 0)


def find_descendants(pids: set[int], parent_pids: Mapping[int, int]) -> set[int]:
    """Return all descendants of ``pids``, without ``pids`` themselves."""
    children: dict[int, list[int]] = {}
    for child, parent in parent_pids.items():
        children.setdefault(parent, []).append(child)
    descendants: set[int] = set()
    waiting = list(pids)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in descendants and child not in pids:
                descendants.add(child)
                waiting.append(child)
    return descendants


def read_children(pid: int) -> list[int] | None:
    """Return the child PIDs of all threads; None if they changed or are too many.

    The list is empty if the process has ended, or if the kernel does not list children.
    """
    folder = f"/proc/{pid}/task"
    for _ in range(MAX_CHILDREN_ATTEMPTS):
        children: list[int] = []
        try:
            tasks = list_entry_names(folder, MAX_THREADS + 1)
        except OSError:
            return children
        if len(tasks) > MAX_THREADS:
            return None
        for task in tasks:
            try:
                children += map(int, read_proc_file(pid, f"task/{task}/children").split())
            except (OSError, ValueError):
                if os.path.exists(f"{folder}/{task}"):
                    return children
                break  # its children now belong to another thread, perhaps one already read
        else:
            return children
    return None


def read_command_line(pid: int) -> list[str]:
    """Return at most :data:`MAX_COMMAND_WORDS` words of the command line; empty if unknown."""
    try:
        line = read_proc_file(pid, "cmdline", MAX_COMMAND_BYTES)
    except OSError:
        return []
    return [
        word.decode(errors="replace")
        for word in line.split(b"\0", MAX_COMMAND_WORDS)[:MAX_COMMAND_WORDS]
    ]


def read_environment_variable(pid: int, name: str) -> str | None:
    """Return a variable with which the process started; None if not set or unreadable."""
    try:
        entries = b"\0" + read_proc_file(pid, "environ", MAX_ENVIRONMENT_BYTES)
    except OSError:
        return None
    _, begin, rest = entries.partition(b"\0" + name.encode() + b"=")
    return rest.partition(b"\0")[0].decode(errors="replace") if begin else None


def read_command_name(pid: int) -> str:
    """Return the kernel's name of the process, at most 15 characters; empty if it has ended."""
    try:
        return read_proc_file(pid, "comm").decode(errors="replace").strip()
    except OSError:
        return ""


class OpenFilesReader:
    """Counts open files, at most every :data:`OPEN_FILES_PERIOD_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at = 0.0
        self._newest: OpenFiles | None = None

    def read(self, get_names: Callable[[], Mapping[int, str]]) -> OpenFiles | None:
        """Return the open files of the process nearest to its limit; None if unknown.

        ``get_names`` returns the names of the engine's processes by PID.
        """
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + OPEN_FILES_PERIOD_S
            self._newest = find_nearest_to_limit(get_names())
        return self._newest


def find_nearest_to_limit(names: Mapping[int, str]) -> OpenFiles | None:
    """Return the open files of the process nearest to its limit; None if unknown."""
    readings = []
    for pid, name in names.items():
        count, limit = _count_open_files(f"/proc/{pid}/fd"), _read_open_files_limit(pid)
        if count is not None and limit is not None:
            readings.append(OpenFiles(process=name, open=count, limit=limit))
    return max(readings, key=lambda files: files.ratio, default=None)


def _count_open_files(folder: str) -> int | None:
    try:
        # Since Linux 6.2 the size of this folder is the number of its entries.
        if size := os.stat(folder).st_size:
            return size
        with os.scandir(folder) as entries:
            count = sum(1 for _ in itertools.islice(entries, MAX_COUNTED_FILES + 1))
    except OSError:
        return None
    return count if count <= MAX_COUNTED_FILES else None


def _read_open_files_limit(pid: int) -> int | None:
    try:
        soft, _ = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
    except (psutil.Error, OSError):
        return None
    return soft if soft > 0 else None
