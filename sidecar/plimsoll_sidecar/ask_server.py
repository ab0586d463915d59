"""Serve manual actions (:mod:`plimsoll_sidecar.ask`) on a Unix socket.

The socket is in the state directory, which no other container mounts, and only this user may open
it.
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

# Resume does not count, because it must be able to end running drains. Twice as many connections
# may be open.
MAX_CONCURRENT_ACTIONS = 4
MAX_REQUEST_BYTES = 1 << 14
IO_TIMEOUT_S = 5.0
BUSY_ANSWER = b"2\nthe supervisor is busy with other actions: try again later"


class AskServer:
    """Serves manual actions.

    ``perform`` takes the arguments of the command, and returns the exit status and the answer.
    """

    def __init__(self, state_dir: Path, perform: Callable[[list[str]], tuple[int, str]]) -> None:
        self._path, self._perform = state_dir / ASK_SOCKET, perform
        self._connections = threading.BoundedSemaphore(2 * MAX_CONCURRENT_ACTIONS)
        self._actions = threading.BoundedSemaphore(MAX_CONCURRENT_ACTIONS)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = BackgroundThread(
            "ask-server", self._accept_connection, expected_errors=(OSError,)
        )

    def start(self) -> None:
        """Start listening. Without a socket, ``ask`` performs the actions in its own process."""
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
                "cannot listen on the socket %s, so manual actions will take longer: %s",
                self._path,
                error.strerror or error,
            )
            self._listener.close()
            return
        self._thread.start()

    def stop(self) -> None:
        """Stop accepting actions, and remove the socket."""
        self._thread.stop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept_connection(self) -> float:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if self._thread.is_stopping:
                return 0.0
            raise
        if self._connections.acquire(blocking=False):
            try:
                run_in_thread("manual action", lambda: self._serve_connection(connection))
            except RuntimeError:
                self._connections.release()
                connection.close()
                raise
        else:
            with connection, contextlib.suppress(OSError):
                connection.sendall(BUSY_ANSWER)
        return 0.0

    def _serve_connection(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                answer = self._answer(
                    _read_request(connection).decode(errors="replace").split("\0")
                )
                connection.settimeout(IO_TIMEOUT_S)
                connection.sendall(answer)
        finally:
            self._connections.release()

    def _answer(self, arguments: list[str]) -> bytes:
        waits = arguments[0] != "resume"
        if waits and not self._actions.acquire(blocking=False):
            return BUSY_ANSWER
        try:
            status, text = self._perform(arguments)
        except Exception as error:  # a bug here must not appear as the end of the supervisor
            log.exception("manual action %s failed unexpectedly", arguments[0])
            status, text = 2, f"{type(error).__name__}: {error}"
        finally:
            if waits:
                self._actions.release()
        return f"{status}\n{text}".encode()


def _read_request(connection: socket.socket) -> bytes:
    data, deadline = b"", time.monotonic() + IO_TIMEOUT_S
    while len(data) <= MAX_REQUEST_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(MAX_REQUEST_BYTES)
        if not piece:
            break
        data += piece
    return data[:MAX_REQUEST_BYTES]
