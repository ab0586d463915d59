"""Write the stacks of a process that cannot answer because a hanging call holds the GIL.

On :data:`STACKS_SIGNAL`, ``faulthandler`` appends the stacks to the file ``PID.stacks`` next to the
socket. Its handler is in C and needs neither the GIL nor another lock.
"""

import contextlib
import faulthandler
import os
import signal
from typing import IO, Optional

STACKS_SIGNAL = 43
"""SIGRTMIN+9 with glibc; the supervisor uses the same number."""


class StackFile:
    """File for the stacks of this process; a forked child opens its own file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = ""
        self._file: Optional[IO[bytes]] = None

    def open(self) -> None:
        """Create the file and install the handler. Raises OSError."""
        if signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:  # other code handles it
            return
        inherited = self._file
        self._path = os.path.join(self._folder, f"{os.getpid()}.stacks")
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # of an earlier process with this PID
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = open(os.open(self._path, flags, 0o600), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True, chain=False)
        if inherited is not None:
            inherited.close()

    def close(self) -> None:
        """Remove the file, but keep the handler: a pending signal must not end the process."""
        if self._path == os.path.join(self._folder, f"{os.getpid()}.stacks"):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
