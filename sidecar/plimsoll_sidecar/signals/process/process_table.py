"""What ``/proc`` tells of any process: parents, command line, environment, container.

Everything here is a hint of one moment. Whoever acts on a process fences it by its start time
(:class:`~plimsoll_sidecar.signals.process.process_id.ProcessId`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from plimsoll_sidecar.signals.process import proc_file
from plimsoll_sidecar.signals.process.cgroup import membership

MAX_ANCESTORS = 64
MAX_WORDS = 64
"""Words of a command line that are looked at: a fork bomb's may be megabytes."""


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
        status = proc_file.read(pid, "status")
    except OSError:
        return True
    # One number for each namespace from ours on. Kernels before 4.1 do not tell.
    return len(status.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()) > 1


def parents() -> dict[int, int]:
    """Return the parent of every process that can be seen, from one look at ``/proc``."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = parent_of(int(name))
            if parent is not None:
                found[int(name)] = parent
    return found


def parent_of(pid: int) -> int | None:
    """None where there is no such process, or only a zombie."""
    try:
        fields = proc_file.read(pid, "stat").rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[1])
    except (OSError, ValueError, IndexError):
        return None


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


def command_line(pid: int) -> list[str]:
    """Return the words that the process was started with; empty where unknown.

    Or what it made of them.
    """
    try:
        line = proc_file.read(pid, "cmdline")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in line.split(b"\0")[:MAX_WORDS]]


def environment(pid: int, name: str) -> str | None:
    """Return a variable that the process was started with.

    None where it has none or may not be read.
    """
    try:
        entries = proc_file.read(pid, "environ").split(b"\0")
    except OSError:
        return None
    prefix = name.encode() + b"="
    return next(
        (e[len(prefix) :].decode(errors="replace") for e in entries if e.startswith(prefix)), None
    )


def command_name(pid: int) -> str:
    """Return the kernel's name of the process, at most 15 characters; empty where it has ended."""
    try:
        return proc_file.read(pid, "comm").decode(errors="replace").strip()
    except OSError:
        return ""
