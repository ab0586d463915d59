"""Worker's end of the socket to the frontend."""

from __future__ import annotations

import select
import socket
import time
from collections import deque

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import FrameReader

# The worker exits if the frontend reads nothing for this long.
SEND_TIMEOUT_S = 30.0
# Above this, the worker runs no more steps. 16 MiB are over 100,000 tokens.
MAX_UNSENT_BYTES = 16 << 20
CONNECT_TIMEOUT_S = 10.0


class FrontendGoneError(ConnectionError):
    """The frontend closed the socket or stopped reading."""


class Channel:
    """Non-blocking connection to the frontend, with a queue of unsent messages."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise FrontendGoneError(
                f"failed to connect to the frontend's socket {path}: {error}"
            ) from None
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        # Time at which the socket last accepted bytes, or the queue was empty.
        self._sent_at = 0.0

    def send(self, message: worker_ipc.FromWorker, flush: bool = False) -> None:
        """Send or queue a message.

        If ``flush``, block until the queue is empty. Raises FrontendGoneError.
        """
        frame = memoryview(worker_ipc.encode_frame(message))
        if not self._unsent:
            self._sent_at = time.monotonic()
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        self._flush()
        while flush and self._unsent:
            select.select([], [self._socket], [], self._get_remaining_s())
            self._flush()

    @property
    def is_full(self) -> bool:
        """Whether more than :data:`MAX_UNSENT_BYTES` are queued."""
        return self._unsent_bytes > MAX_UNSENT_BYTES

    def _flush(self) -> None:
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
            if self._get_remaining_s() <= 0:
                raise FrontendGoneError(
                    f"the frontend has not read its socket for {SEND_TIMEOUT_S:g} s"
                ) from None
        except OSError as error:
            raise FrontendGoneError(f"failed to write to the frontend's socket: {error}") from None

    def _get_remaining_s(self) -> float:
        return max(0.0, self._sent_at + SEND_TIMEOUT_S - time.monotonic())

    def receive(self, timeout_s: float) -> list[worker_ipc.ToWorker]:
        """Return the messages that arrive within ``timeout_s`` seconds, and send queued messages.

        Return early if bytes arrive or the queue has space again. Raises FrontendGoneError.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            was_full, unsent = self.is_full, [self._socket] if self._unsent else []
            readable, writable, _ = select.select(
                [self._socket], unsent, [], max(0.0, deadline - time.monotonic())
            )
            if self._unsent:
                self._flush()
            if readable:
                break
            if not writable or (was_full and not self.is_full):
                return []
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise FrontendGoneError(f"failed to read from the frontend's socket: {error}") from None
        if not data:
            raise FrontendGoneError("the frontend closed the socket")
        return [worker_ipc.to_worker_decoder.decode(body) for body in self._reader.feed(data)]

    def is_readable(self) -> bool:
        """Report whether a message has arrived, or the frontend has exited."""
        return bool(select.select([self._socket], [], [], 0.0)[0])

    def wait_until_closed(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until the frontend closes the socket."""
        deadline = time.monotonic() + timeout_s
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                self.receive(left_s)
        except FrontendGoneError:
            return

    def close(self) -> None:
        """Close the socket, which tells the frontend that the worker has ended."""
        self._socket.close()
