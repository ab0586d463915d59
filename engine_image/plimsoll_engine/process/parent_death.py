"""Parent-death signal (``PR_SET_PDEATHSIG``, prctl(2)), so that no process outlives the engine."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""Defined in linux/prctl.h."""


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when ``parent`` exits. Exit if it has exited already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "cannot set the parent-death signal: prctl(PR_SET_PDEATHSIG) failed"
        )
    if os.getppid() != parent:
        os._exit(1)


def outlive_zygote(zygote: int, frontend: int) -> None:
    """Let this process survive the exit of its parent ``zygote``, as a child of ``frontend``.

    It is killed when the frontend exits. If the frontend does not become its parent, it exits with
    the zygote. If the frontend exits first, the zygote kills it.
    """

    def exit_if_adopted(*_: object) -> None:
        if os.getppid() != frontend:
            os._exit(1)
        die_with_parent(frontend)

    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGUSR2, exit_if_adopted)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "cannot set the parent-death signal: prctl(PR_SET_PDEATHSIG) failed"
        )
    if os.getppid() != zygote:
        exit_if_adopted()


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
