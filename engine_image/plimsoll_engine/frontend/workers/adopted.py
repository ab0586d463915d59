"""Watch processes whose zygote has died. Their new parent is the frontend, a subreaper."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Callable

from plimsoll_api.admin import Role
from plimsoll_engine.messages.zygote_ipc import Exited

log = logging.getLogger(__name__)

# From linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36


def set_subreaper() -> None:
    """Make this process the parent of its orphaned descendants, instead of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        log.error(
            "the frontend cannot become a subreaper, so it will not see the exit of orphaned "
            "workers",
            extra={"errno": ctypes.get_errno()},
        )


class OrphanWatcher:
    """Watcher of processes whose zygote has died.

    ``on_exit`` receives the messages that the zygote would have sent.
    """

    def __init__(self, on_exit: Callable[[Exited], None]) -> None:
        self._on_exit = on_exit
        self._pidfds: dict[int, int] = {}

    def watch(self, number: int, pid: int, role: Role, rank: int = 0) -> None:
        """Watch the process ``pid``, whose zygote has been reaped.

        ``number`` is the worker's epoch or the weight server's number.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_exit(Exited(number, pid, -signal.SIGKILL, role, rank))
            return
        self._pidfds[pid] = pidfd
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._reap, number, pid, role, rank)

    def kill(self) -> None:
        """Send SIGKILL to all watched processes."""
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _reap(self, number: int, pid: int, role: Role, rank: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        code = -int(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # if init is the parent, the status is unknown
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._on_exit(Exited(number, pid, code, role, rank))


def reap_unknown_children(known_pids: set[int]) -> None:
    """Reap exited children that are not in ``known_pids``."""
    with contextlib.suppress(ChildProcessError):
        while (exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if exited.si_pid in known_pids:
                return  # the code that started it reaps it
            os.waitpid(exited.si_pid, 0)
