"""One rank's end of its connection to rank 0."""

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
"""A peer that reads nothing for so long is hung or gone."""
CONNECT_TIMEOUT_S = 60.0
"""Rank 0 listens as soon as it runs; where each rank imports by itself that takes seconds."""
RETRY_S = 0.01


class LeaderGone(ConnectionError):
    """Rank 0 closed the connection or does not read it: there is nobody to follow."""


class Link:
    """Connects at once; commands then wait in the socket."""

    def __init__(self, run_dir: str | Path, epoch: int, shard: Shard) -> None:
        """Connect to rank 0; raise :class:`LeaderGone` where it does not listen in time."""
        self.shard = shard
        path, self.store = rendezvous_paths(run_dir, epoch)
        self._socket = _connect(path)
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._reader = FrameReader()
        self._commands: deque[rank_ipc.Command] = deque()

    def join(self) -> None:
        """Tell rank 0 that the device works: it may form the group."""
        self.send(rank_ipc.Joining(self.shard.rank, os.getpid()))

    def send(self, message: rank_ipc.Reply) -> None:
        """Send a reply to rank 0. Raises the link's error when rank 0 is gone."""
        try:
            self._socket.sendall(rank_ipc.frame(message))
        except OSError as error:
            raise LeaderGone(f"rank 0: {error}") from None

    def receive(self) -> rank_ipc.Command:
        """Return the next command. Waits as long as rank 0 lives; :class:`LeaderGone` then."""
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
        """Until rank 0 has closed its end, at most ``timeout_s``; what it says is dropped."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                readable, _, _ = select.select([self._socket], [], [], left_s)
                if readable and not self._socket.recv(1 << 20):
                    return

    def close(self) -> None:
        """Close the socket; rank 0 then takes this rank for lost."""
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
