"""Which process serves a port of this pod: how an engine that names no process is found.

The containers of a pod share the network, and with ``shareProcessNamespace`` the processes. File
descriptors are readable for processes of the same user only; without them the engine is found by
the words of its command line, which everybody may read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

LISTEN, ESTABLISHED = "0A", "01"
WRAPPERS = frozenset({"sh", "bash", "dash", "ash", "busybox", "tini", "dumb-init", "catatonit"})
"""What starts an engine and does not pass its signals on, or ends with it."""
MAX_ANCESTORS = 64


def sockets(port: int, state: str) -> set[str]:
    """Inodes of this network's TCP sockets at the local ``port`` in ``state``."""
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) < 10 or fields[3] != state:
                continue
            if int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def engine_pid(port: int, words: tuple[str, ...]) -> int | None:
    """The PID that the engine at ``port`` is ended by; None where none can be found.

    ``words`` are tried in the command lines where the sockets' owners cannot be read: one process
    alone may have one of them.
    """
    own = set(ancestors(os.getpid()))
    inodes = {f"socket:[{inode}]" for inode in sockets(port, LISTEN)}
    if not inodes:
        return None
    tops = {top(pid, own) for pid in _pids() if pid not in own and _holds(pid, inodes)}
    if not tops and words:
        tops = {top(pid, own) for pid in _pids() if pid not in own and _named(pid, words)}
    # A forked worker that holds the socket too has the same top; two tops are two engines.
    return tops.pop() if len(tops) == 1 else None


def top(pid: int, own: set[int]) -> int:
    """The outermost ancestor that is the engine still: neither ours, nor a shell, nor PID 1."""
    for ancestor in list(ancestors(pid))[1:]:
        if ancestor <= 1 or ancestor in own or _comm(ancestor) in WRAPPERS:
            break
        pid = ancestor
    return pid


def ancestors(pid: int) -> Iterator[int]:
    """``pid``, its parent and so on."""
    for _ in range(MAX_ANCESTORS):
        if pid <= 0:
            return
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def environment(pid: int, name: str) -> str | None:
    """A variable that the process was started with; None where it has none or may not be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = name.encode() + b"="
    return next(
        (e[len(prefix) :].decode(errors="replace") for e in entries if e.startswith(prefix)), None
    )


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _holds(pid: int, inodes: set[str]) -> bool:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                return True
        except OSError:
            continue
    return False


def _named(pid: int, words: tuple[str, ...]) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(word in line for word in words)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
