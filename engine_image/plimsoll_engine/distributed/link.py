"""Connection of another rank to rank 0."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from pathlib import Path

from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.framing import FrameReader
from plimsoll_engine.messages.zygote_ipc import make_rendezvous_paths

# A process that reads nothing for this long is considered lost.
SEND_TIMEOUT_S = 30.0
# A rank that the zygote does not fork takes seconds to import its modules.
CONNECT_TIMEOUT_S = 60.0
CONNECT_RETRY_INTERVAL_S = 0.01


class LeaderLostError(ConnectionError):
    """Rank 0 closed the connection or stopped reading."""


class LeaderConnection:
    """Connection of this rank to rank 0."""

    def __init__(self, run_dir: str | Path, epoch: int, shard: Shard) -> None:
        """Connect to rank 0. Raises LeaderLostError after :data:`CONNECT_TIMEOUT_S`."""
        self.shard = shard
        path, self.store = make_rendezvous_paths(run_dir, epoch)
        self._socket = _connect(path)
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._reader = FrameReader()
        self._commands: deque[rank_ipc.Command] = deque()

    def join_group(self) -> None:
        """Report to rank 0 that this rank has initialised its device."""
        self.send(rank_ipc.RankHello(self.shard.rank, os.getpid()))

    def send(self, message: rank_ipc.Reply) -> None:
        """Send a reply to rank 0. Raises LeaderLostError."""
        try:
            self._socket.sendall(rank_ipc.encode_frame(message))
        except OSError as error:
            raise LeaderLostError(f"failed to send a message to rank 0: {error}") from None

    def receive(self) -> rank_ipc.Command:
        """Wait for the next command and return it. Raises LeaderLostError if rank 0 has exited."""
        while not self._commands:
            select.select([self._socket], [], [])
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:
                raise LeaderLostError(f"failed to receive a command from rank 0: {error}") from None
            if not data:
                raise LeaderLostError("rank 0 has exited")
            self._commands += map(rank_ipc.to_rank_decoder.decode, self._reader.feed(data))
        return self._commands.popleft()

    def wait_until_closed(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until rank 0 closes the connection."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                readable, _, _ = select.select([self._socket], [], [], left_s)
                if readable and not self._socket.recv(1 << 20):
                    return

    def close(self) -> None:
        """Close the connection, which tells rank 0 that this rank is lost."""
        self._socket.close()


def _connect(path: Path) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise LeaderLostError(f"cannot connect to rank 0 at {path}: {error}") from None
            time.sleep(CONNECT_RETRY_INTERVAL_S)
        else:
            return connection
