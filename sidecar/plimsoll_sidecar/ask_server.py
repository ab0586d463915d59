"""Serve actions that people request (:mod:`plimsoll_sidecar.ask`) on a Unix socket.

The socket is in the state directory, which no other container mounts, and only this user may open
it. Each request has a thread and a deadline. Only a few run at a time; the others are refused as
busy. A place is reserved for resume, because it ends the drains that occupy the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.names import ASK_SOCKET
from plimsoll_sidecar.background import Part, once

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Actions at a time, a resume apart, and as many that are read."""
MAX_BYTES = 1 << 14
READ_S = 5.0
"""Time to send a request, or to take the answer."""
BUSY = b"2\nthe supervisor is busy with other actions: try again"


class AskServer:
    """``handle`` gets the arguments and returns exit status and text."""

    def __init__(self, state_dir: Path, handle: Callable[[list[str]], tuple[int, str]]) -> None:
        self._path, self._handle = state_dir / ASK_SOCKET, handle
        self._lines = threading.BoundedSemaphore(2 * AT_ONCE)
        self._actions = threading.BoundedSemaphore(AT_ONCE)
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
        if self._lines.acquire(blocking=False):
            try:
                once("manual action", lambda: self._serve(line))
            except RuntimeError:
                self._lines.release()
                line.close()
                raise
        else:
            with line, contextlib.suppress(OSError):
                line.sendall(BUSY)
        return 0.0

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, contextlib.suppress(OSError):
                answer = self._answer(_read(line).decode(errors="replace").split("\0"))
                line.settimeout(READ_S)
                line.sendall(answer)
        finally:
            self._lines.release()

    def _answer(self, words: list[str]) -> bytes:
        waits = words[0] != "resume"
        if waits and not self._actions.acquire(blocking=False):
            return BUSY
        try:
            status, text = self._handle(words)
        except Exception as error:  # a bug here must not look like a supervisor that ended
            log.exception("a manual action failed")
            status, text = 2, f"{type(error).__name__}: {error}"
        finally:
            if waits:
                self._actions.release()
        return f"{status}\n{text}".encode()


def _read(line: socket.socket) -> bytes:
    """Return the request as a whole. Raises TimeoutError."""
    data, deadline = b"", time.monotonic() + READ_S
    while len(data) <= MAX_BYTES:
        line.settimeout(max(0.001, deadline - time.monotonic()))
        piece = line.recv(MAX_BYTES)
        if not piece:
            break
        data += piece
    return data[:MAX_BYTES]
