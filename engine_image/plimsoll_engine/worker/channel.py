"""The worker's end of the socket to its frontend."""

from __future__ import annotations

import select
import socket
import time
from collections import deque

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import FrameReader

SEND_TIMEOUT_S = 30.0
"""A frontend that reads nothing for so long is hung or gone; the worker must not hang with it."""
MAX_UNSENT_BYTES = 16 << 20
"""What steps may leave unsent while the frontend is busy: 100,000 tokens and more. Beyond it, the
next message waits for the frontend."""
CONNECT_TIMEOUT_S = 10.0


class FrontendGoneError(ConnectionError):
    """The frontend closed the socket or does not read it: the worker has nobody to work for."""


class Channel:
    """Sends and receives without waiting longer than asked.

    What the socket does not take at once is sent with the next call: a step does not wait for a
    frontend that is busy.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise FrontendGoneError(f"frontend socket {path}: {error}") from None
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._sent_at = 0.0
        """When the socket last took something, or last had all (CLOCK_MONOTONIC)."""

    def send(self, message: worker_ipc.FromWorker, last: bool = False) -> None:
        """Send one message, or keep it for later.

        Waits until the frontend has all, where it is the ``last`` one or too much is kept. Raises
        FrontendGoneError.
        """
        frame = memoryview(worker_ipc.frame(message))
        if not self._unsent:
            self._sent_at = time.monotonic()
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        self._flush()
        most = 0 if last else MAX_UNSENT_BYTES
        while self._unsent_bytes > most:
            select.select([], [self._socket], [], self._patience_s())
            self._flush()

    def _flush(self) -> None:
        """Send what the socket takes now. Raises FrontendGoneError, also if it takes too long."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                self._sent_at = time.monotonic()
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            if self._patience_s() <= 0:
                raise FrontendGoneError(
                    f"the frontend has read nothing for {SEND_TIMEOUT_S:g} s"
                ) from None
        except OSError as error:
            raise FrontendGoneError(f"frontend socket: {error}") from None

    def _patience_s(self) -> float:
        return max(0.0, self._sent_at + SEND_TIMEOUT_S - time.monotonic())

    def receive(self, timeout_s: float) -> list[worker_ipc.ToWorker]:
        """Return what has arrived, after waiting at most ``timeout_s`` for the first byte.

        Sends meanwhile what was kept.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            unsent = [self._socket] if self._unsent else []
            readable, writable, _ = select.select(
                [self._socket], unsent, [], max(0.0, deadline - time.monotonic())
            )
            if self._unsent:
                self._flush()
            if readable:
                break
            if not writable:
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
