"""Who listens at a port of this network namespace, and what is connected to it.

The containers of a pod share the network, and with ``shareProcessNamespace`` the processes. File
descriptors are readable for processes of the same user only, and only where they have no more
capabilities than the reader.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from plimsoll_sidecar.signals.process import sock_diag

LISTEN, ESTABLISHED = 10, 1
"""include/net/tcp_states.h"""


def sockets(port: int, state: int) -> set[str]:
    """Inodes of this network's TCP sockets at the local ``port`` in ``state``."""
    try:
        return {str(one.inode) for one in sock_diag.tcp_sockets(port, state)}
    except (OSError, struct.error):
        return listed(port, state)


def listed(port: int, state: int) -> set[str]:
    """:func:`sockets` by the tables in /proc, for kernels and sandboxes without sock_diag."""
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) < 10 or int(fields[3], 16) != state:
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
