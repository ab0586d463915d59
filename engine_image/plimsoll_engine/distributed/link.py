"""Another rank's side of its connection to rank 0."""

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
from plimsoll_engine.messages.zygote_ipc import rendezvous_paths

SEND_TIMEOUT_S = 30.0
"""Time after which a peer that reads nothing counts as gone."""
CONNECT_TIMEOUT_S = 60.0
"""Timeout of connecting. Rank 0 listens at once; if each rank imports by itself, that takes
seconds.
"""
RETRY_S = 0.01


class LeaderGone(ConnectionError):
    """Rank 0 closed the connection or does not read it, so this rank has to exit."""


class Link:
    """Connection to rank 0. It connects at once; commands wait in the socket."""

    def __init__(self, run_dir: str | Path, epoch: int, shard: Shard) -> None:
        """Connect to rank 0. Raises :class:`LeaderGone` after a timeout."""
        self.shard = shard
        path, self.store = rendezvous_paths(run_dir, epoch)
        self._socket = _connect(path)
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._reader = FrameReader()
        self._commands: deque[rank_ipc.Command] = deque()

    def join(self) -> None:
        """Report to rank 0 that this rank's device works, so that the group can be formed."""
        self.send(rank_ipc.RankHello(self.shard.rank, os.getpid()))

    def send(self, message: rank_ipc.Reply) -> None:
        """Send a reply to rank 0. Raises :class:`LeaderGone`."""
        try:
            self._socket.sendall(rank_ipc.frame(message))
        except OSError as error:
            raise LeaderGone(f"rank 0: {error}") from None

    def receive(self) -> rank_ipc.Command:
        """Wait for the next command and return it. Raises :class:`LeaderGone` if rank 0 is gone."""
        while not self._commands:
            select.select([self._socket], [], [])
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:
                raise LeaderGone(f"rank 0: {error}") from None
            if not data:
                raise LeaderGone("rank 0 is gone")
            self._commands += map(rank_ipc.to_rank.decode, self._reader.feed(data))
        return self._commands.popleft()

    def wait_closed(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for rank 0 to close the connection.

        Ignores its messages.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                readable, _, _ = select.select([self._socket], [], [], left_s)
                if readable and not self._socket.recv(1 << 20):
                    return

    def close(self) -> None:
        """Close the socket. Rank 0 then counts this rank as lost."""
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
                raise LeaderGone(f"rank 0's socket {path}: {error}") from None
            time.sleep(RETRY_S)
        else:
            return connection
