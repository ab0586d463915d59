"""Stacks of a process that cannot answer, for it hangs with Python's global lock.

A signal makes faulthandler write them: its handler is C and needs no lock. They are appended to
``PID.stacks`` beside the socket, which also says that the signal is handled here. It is a real-time
signal, which engines do not use; where somebody does, it stays theirs.
"""

import contextlib
import faulthandler
import os
import signal
from typing import IO, Optional

SIGNAL = 43
"""SIGRTMIN+9 with glibc; the supervisor has the same number."""


class StackFile:
    """One process's file. After a fork the child opens one of its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = ""
        self._file: Optional[IO[bytes]] = None

    def open(self) -> None:
        """OSError where the folder cannot be used."""
        if signal.getsignal(SIGNAL) != signal.SIG_DFL:
            return
        inherited = self._file
        self._path = os.path.join(self._folder, f"{os.getpid()}.stacks")
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # of a process that had this PID before
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = open(os.open(self._path, flags, 0o600), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)
        if inherited is not None:
            inherited.close()

    def close(self) -> None:
        """Remove the file and keep the handler: a signal under way must not end the process."""
        if self._path == os.path.join(self._folder, f"{os.getpid()}.stacks"):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
