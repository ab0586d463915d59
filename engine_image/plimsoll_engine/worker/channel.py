"""The worker's end of the socket to its frontend."""

from __future__ import annotations

import select
import socket
import time

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import FrameReader

SEND_TIMEOUT_S = 30.0
"""A frontend that reads nothing for so long is hung or gone; the worker must not hang with it."""
CONNECT_TIMEOUT_S = 10.0


class FrontendGoneError(ConnectionError):
    """The frontend closed the socket or does not read it: the worker has nobody to work for."""


class Channel:
    """Sends in full, receives without waiting longer than asked."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise FrontendGoneError(f"frontend socket {path}: {error}") from None
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._reader = FrameReader()

    def send(self, message: worker_ipc.FromWorker) -> None:
        """Send one message. Raises FrontendGoneError."""
        try:
            self._socket.sendall(worker_ipc.frame(message))
        except OSError as error:
            raise FrontendGoneError(f"frontend socket: {error}") from None

    def receive(self, timeout_s: float) -> list[worker_ipc.ToWorker]:
        """Return what has arrived, after waiting at most ``timeout_s`` for the first byte."""
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        if not readable:
            return []
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise FrontendGoneError(f"frontend socket: {error}") from None
        if not data:
            raise FrontendGoneError("the frontend closed the socket")
        return [worker_ipc.to_worker.decode(body) for body in self._reader.feed(data)]

    def readable(self) -> bool:
        """Whether something has arrived, or the frontend is gone."""
        return bool(select.select([self._socket], [], [], 0.0)[0])

    def wait_closed(self, timeout_s: float) -> None:
        """Until the frontend has closed its end, at most ``timeout_s``; what it says is dropped."""
        deadline = time.monotonic() + timeout_s
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                self.receive(left_s)
        except FrontendGoneError:
            return

    def close(self) -> None:
        """Close the socket; the frontend then takes the worker for ended."""
        self._socket.close()
