"""End processes together with the engine, by parent-death signals (prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal

# From linux/prctl.h.
PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent exits. Exit if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "cannot set the parent-death signal: prctl(PR_SET_PDEATHSIG) failed"
        )
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_zygote(zygote_pid: int, frontend_pid: int) -> None:
    """Let this process survive the zygote, its parent, but not the frontend."""

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
    """Let this process survive its parent, even after :func:`die_with_parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
