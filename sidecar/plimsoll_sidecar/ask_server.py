"""Serve manual actions (:mod:`plimsoll_sidecar.ask`) on a Unix socket.

The socket is in the state directory, which no other container mounts, and only this user may open
it. Each request has a thread and a deadline. Only :data:`MAX_CONCURRENT_ACTIONS` actions run at the
same time; the server refuses others as busy. Resume does not count against this limit, because it
ends the drains that may have reached the limit.
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
from plimsoll_sidecar.background import BackgroundThread, run_in_thread

log = logging.getLogger(__name__)

MAX_CONCURRENT_ACTIONS = 4
"""Maximum number of concurrent actions, not counting resume; half the number of connections."""
MAX_REQUEST_BYTES = 1 << 14
IO_TIMEOUT_S = 5.0
"""Timeout in seconds of reading a request or writing an answer."""
BUSY_ANSWER = b"2\nthe supervisor is busy with other actions: try again later"
"""Answer if too many actions are running."""


class AskServer:
    """Serve manual actions. ``handle`` takes the arguments and returns exit status and text."""

    def __init__(self, state_dir: Path, handle: Callable[[list[str]], tuple[int, str]]) -> None:
        self._path, self._handle = state_dir / ASK_SOCKET, handle
        self._lines = threading.BoundedSemaphore(2 * MAX_CONCURRENT_ACTIONS)
        self._actions = threading.BoundedSemaphore(MAX_CONCURRENT_ACTIONS)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._part = BackgroundThread("ask-server", self._accept, expected=(OSError,))

    def start(self) -> None:
        """Start listening.

        If that fails, ``ask`` performs the actions itself, which takes longer.
        """
        try:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            before = os.umask(0o177)
            try:
                self._listener.bind(str(self._path))
            finally:
                os.umask(before)
            self._listener.listen(MAX_CONCURRENT_ACTIONS)
        except OSError as error:
            log.warning(
                "cannot listen on %s: %s; manual actions will take longer",
                self._path,
                error.strerror or error,
            )
            self._listener.close()
            return
        self._part.start()

    def stop(self) -> None:
        """Stop accepting actions and remove the socket."""
        self._part.stop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> float:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if self._part.is_stopping:
                return 0.0
            raise
        if self._lines.acquire(blocking=False):
            try:
                run_in_thread("manual action", lambda: self._serve(connection))
            except RuntimeError:
                self._lines.release()
                connection.close()
                raise
        else:
            with connection, contextlib.suppress(OSError):
                connection.sendall(BUSY_ANSWER)
        return 0.0

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                answer = self._answer(
                    _read_request(connection).decode(errors="replace").split("\0")
                )
                connection.settimeout(IO_TIMEOUT_S)
                connection.sendall(answer)
        finally:
            self._lines.release()

    def _answer(self, arguments: list[str]) -> bytes:
        waits = arguments[0] != "resume"
        if waits and not self._actions.acquire(blocking=False):
            return BUSY_ANSWER
        try:
            status, text = self._handle(arguments)
        except Exception as error:  # a bug here must not appear as the end of the supervisor
            log.exception("the manual action %s failed unexpectedly", arguments[0])
            status, text = 2, f"{type(error).__name__}: {error}"
        finally:
            if waits:
                self._actions.release()
        return f"{status}\n{text}".encode()


def _read_request(connection: socket.socket) -> bytes:
    """Return the complete request. Raises TimeoutError."""
    data, deadline = b"", time.monotonic() + IO_TIMEOUT_S
    while len(data) <= MAX_REQUEST_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(MAX_REQUEST_BYTES)
        if not piece:
            break
        data += piece
    return data[:MAX_REQUEST_BYTES]
