"""Parent-death signals (``PR_SET_PDEATHSIG``, prctl(2)), so that no process outlives the engine."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""Defined in linux/prctl.h."""


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent exits.

    Exit now if the parent has already exited.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "cannot set the parent-death signal: prctl(PR_SET_PDEATHSIG) failed"
        )
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_zygote(zygote_pid: int, frontend_pid: int) -> None:
    """Let this process survive its parent, the zygote, if the frontend becomes its new parent.

    Otherwise, this process exits with the zygote. Once the frontend is the parent, the kernel kills
    this process when the frontend exits. If the frontend exits first, the zygote kills it.
    """

    def follow_frontend(*_: object) -> None:
        if os.getppid() != frontend_pid:
            os._exit(1)
        die_with_parent(frontend_pid)

    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGUSR2, follow_frontend)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "cannot set the parent-death signal: prctl(PR_SET_PDEATHSIG) failed"
        )
    if os.getppid() != zygote_pid:
        follow_frontend()


def outlive_parent() -> None:
    """Clear the parent-death signal that :func:`die_with_parent` set."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
