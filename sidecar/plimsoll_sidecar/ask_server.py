"""Listens for what persons ask (:mod:`plimsoll_sidecar.ask`), on a socket of the supervisor's own.

It lies in the state directory, which no other container mounts, and only this user may open it.
Each request has a thread and a deadline; there are few at a time, and the rest is told to wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from plimsoll_sidecar.background import Part, once
from plimsoll_sidecar.paths import SOCKET

log = logging.getLogger(__name__)

AT_ONCE = 4
MAX_BYTES = 1 << 14
READ_S = 5.0
BUSY = b"2\nthe supervisor is busy with other actions: try again"


class AskServer:
    """``handle`` gets the arguments and returns exit status and text."""

    def __init__(self, state_dir: Path, handle: Callable[[list[str]], tuple[int, str]]) -> None:
        self._path, self._handle = state_dir / SOCKET, handle
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._part = Part("ask-server", self._accept, expected=(OSError,))

    def start(self) -> None:
        """Listen from now on. Where it cannot, ``ask`` acts by itself, which takes longer."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            before = os.umask(0o177)
            try:
                self._listener.bind(str(self._path))
            finally:
                os.umask(before)
            self._listener.listen(AT_ONCE)
        except OSError as error:
            log.warning(
                "%s: %s: manual actions will take longer", self._path, error.strerror or error
            )
            self._listener.close()
            return
        self._part.start()

    def stop(self) -> None:
        """Take no more actions and remove the socket."""
        self._part.stop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> float:
        try:
            line, _ = self._listener.accept()
        except OSError:
            if self._part.stopping:
                return 0.0
            raise
        if self._free.acquire(blocking=False):
            try:
                once("manual action", lambda: self._serve(line))
            except RuntimeError:
                self._free.release()
                line.close()
                raise
        else:
            with line, contextlib.suppress(OSError):
                line.sendall(BUSY)
        return 0.0

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, contextlib.suppress(OSError):
                line.settimeout(READ_S)
                status, text = self._answer(_read(line))
                line.sendall(f"{status}\n{text}".encode())
        finally:
            self._free.release()

    def _answer(self, data: bytes) -> tuple[int, str]:
        try:
            return self._handle(data.decode(errors="replace").split("\0"))
        except Exception as error:  # a bug here must not look like a supervisor that ended
            log.exception("a manual action failed")
            return 2, f"{type(error).__name__}: {error}"


def _read(line: socket.socket) -> bytes:
    data = b""
    while len(data) <= MAX_BYTES and (piece := line.recv(MAX_BYTES)):
        data += piece
    return data[:MAX_BYTES]
