"""Processes whose zygote has died: children of the frontend from then on, which sees them end."""

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

PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h"""


def become_subreaper() -> None:
    """Take in descendants that lose their parents: they become this process's, not init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        log.error("not a subreaper", extra={"errno": ctypes.get_errno()})


class Adopted:
    """``on_exit`` is called for each one that ended, as a zygote calls it for its own."""

    def __init__(self, on_exit: Callable[[Exited], None]) -> None:
        self._on_exit = on_exit
        self._pidfds: dict[int, int] = {}

    def adopt(self, number: int, pid: int, role: Role, rank: int = 0) -> None:
        """Watch ``pid``, whose parent is gone and was waited for."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_exit(Exited(number, pid, -signal.SIGKILL, role, rank))
            return
        self._pidfds[pid] = pidfd
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._ended, number, pid, role, rank)

    def kill(self) -> None:
        """End all that are left."""
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _ended(self, number: int, pid: int, role: Role, rank: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        code = -int(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # it is init's: how it ended is unknown
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._on_exit(Exited(number, pid, code, role, rank))


def reap_strangers(known: set[int]) -> None:
    """Wait for the ended children that are none of ``known``: what a killed worker left."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid in known:
                return  # whoever knows it waits for it; the others' turn comes later
            os.waitpid(found.si_pid, 0)
