"""Who listens at a port of this network namespace, and what is connected to it.

The containers of a pod share the network, and with ``shareProcessNamespace`` the processes. File
descriptors are readable for processes of the same user only, and only where they have no more
capabilities than the reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

LISTEN, ESTABLISHED = "0A", "01"


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


def holders(inodes: Iterable[str], pids: Iterable[int]) -> set[int]:
    """Those of ``pids`` that hold one of the sockets, as far as that may be seen."""
    links = {f"socket:[{inode}]" for inode in inodes}
    return {pid for pid in pids if _holds(pid, links)} if links else set()


def _holds(pid: int, links: set[str]) -> bool:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") in links:
                return True
        except OSError:
            continue
    return False
