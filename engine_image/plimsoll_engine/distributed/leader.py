"""Rank 0's side of the connections to the other ranks: it sends commands and receives replies."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.distributed.link import CONNECT_TIMEOUT_S, SEND_TIMEOUT_S
from plimsoll_engine.errors import LoadError, RanksLost
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.framing import FrameReader
from plimsoll_engine.messages.zygote_ipc import rendezvous_paths

ANSWER_TIMEOUT_S = 30.0
"""Timeout of a reply; a rank first finishes the steps before the command."""
LOAD_TIMEOUT_S = 1800.0
"""Timeout of loading a rank's weights, for 140 GB from a slow disk."""
END_TIMEOUT_S = 10.0
GONE_TIMEOUT_S = 1.0
"""Time to look for a failed rank after a collective has failed."""

Answer = TypeVar("Answer", bound=rank_ipc.Reply)


class _Peer:
    """Connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_TIMEOUT_S)
        self.socket = connection
        self._reader = FrameReader()
        self._heard: deque[rank_ipc.Reply] = deque()

    def receive(self, timeout_s: float) -> rank_ipc.Reply | None:
        """Return the next message; None after ``timeout_s`` seconds.

        Raises ConnectionError if the rank is gone.
        """
        deadline = time.monotonic() + timeout_s
        while not self._heard:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self.socket], [], [], left_s)[0]:
                return None
            if not (data := self.socket.recv(1 << 20)):
                raise ConnectionError("it closed the connection")
            self._heard += map(rank_ipc.from_rank.decode, self._reader.feed(data))
        return self._heard.popleft()


class Leader:
    """Rank 0's connections to the other ranks, which it accepts from its creation on.

    ``lost`` is set once the group has failed. The connections stay open until :meth:`close`, and
    the other ranks live as long.
    """

    shard: Shard

    def __init__(self, run_dir: str | Path, epoch: int, size: int) -> None:
        self.shard = Shard(0, size)
        self.lost = False
        self._path, self.store = rendezvous_paths(run_dir, epoch)
        self._peers: dict[int, _Peer] = {}
        self._reports: dict[int, rank_ipc.RankReport] = {}
        self._asked = False
        # Remove files of a killed predecessor. Other ranks connect only once this one listens.
        self.store.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._listener.listen()

    def join(self) -> None:
        """Wait until each rank has connected and initialised its device."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while len(self._peers) < self.shard.size - 1:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise self._lose_rank("did not connect", self._missing()) from None
            peer = _Peer(connection)
            joining = self._expect(
                peer, self._missing(), rank_ipc.RankHello, deadline - time.monotonic()
            )
            self._peers[joining.rank] = peer

    def loaded(self) -> None:
        """Wait until each rank has loaded its part of the model."""
        self._gather(rank_ipc.RankReady, LOAD_TIMEOUT_S)

    def tell(self, command: rank_ipc.Command) -> None:
        """Send a command to every rank. Raises :class:`RanksLost` if one is gone."""
        data = rank_ipc.frame(command)
        for rank, peer in self._peers.items():
            try:
                peer.socket.sendall(data)
            except OSError as error:
                raise self._lose_rank(f"cannot send to it: {error}", rank, gone=True) from None

    def ask(self, command: rank_ipc.Command, kind: type[Answer]) -> list[Answer]:
        """Send ``command`` to every rank. Return their replies in rank order.

        Raises :class:`RanksLost`, or LoadError if a rank reports a permanent failure.
        """
        self.tell(command)
        return self._gather(kind, ANSWER_TIMEOUT_S)

    @contextlib.contextmanager
    def together(self, command: rank_ipc.Command) -> Iterator[None]:
        """Let the other ranks run ``command`` while the caller runs the block.

        Ranks wait for each other in its collectives, so that any failure in the block ends the
        group. It is raised as :class:`RanksLost`.
        """
        self.tell(command)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any error ends the group
            raise self._failure_reason(f"{type(error).__name__}: {error}") from None

    def accounts(self) -> list[rank_ipc.RankReport]:
        """Return each rank's latest memory report. Only the first call waits for reports."""
        if not self._reports:
            self.ask(rank_ipc.ReportMemory(), rank_ipc.RankReport)
        elif not self._asked:
            self.tell(rank_ipc.ReportMemory())
            self._asked = True
        else:
            self._listen()
        return [report for _, report in sorted(self._reports.items())]

    def waiting_accounts(self) -> list[rank_ipc.RankReport]:
        """Return each rank's memory before it serves, and forget it, because serving needs more."""
        found = self.accounts()
        self._reports = {}
        return found

    def drop(self) -> None:
        """Ask the other ranks to drop their KV pools, unless they no longer follow this leader."""
        with contextlib.suppress(RanksLost, LoadError):
            if not self.lost:
                self.ask(rank_ipc.ReleasePool(), rank_ipc.Acknowledgement)

    def end(self) -> None:
        """Let the other ranks release everything. :meth:`ended` returns the result."""
        with contextlib.suppress(RanksLost):
            if not self.lost:
                self.tell(rank_ipc.Shutdown())

    def ended(self) -> list[rank_ipc.RankShutdownReport] | None:
        """Return what remains allocated on each rank; None if unknown."""
        if self.lost or len(self._peers) < self.shard.size - 1:
            return None
        try:
            return self._gather(rank_ipc.RankShutdownReport, END_TIMEOUT_S)
        except (RanksLost, LoadError):
            return None

    def close(self) -> None:
        """Close all connections, so that the other ranks exit. Idempotent."""
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        self._listener.close()
        for path in (self._path, self.store):
            with contextlib.suppress(OSError):  # no such file, or a read-only directory
                path.unlink()

    # ---- steps

    def _missing(self) -> int:
        return min(set(range(1, self.shard.size)) - self._peers.keys())

    def _gather(self, kind: type[Answer], timeout_s: float) -> list[Answer]:
        deadline = time.monotonic() + timeout_s
        return [
            self._expect(peer, rank, kind, deadline - time.monotonic())
            for rank, peer in sorted(self._peers.items())
        ]

    def _expect(self, peer: _Peer, rank: int, kind: type[Answer], timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = peer.receive(max(0.0, deadline - time.monotonic()))
            except OSError as error:
                raise self._lose_rank(f"lost its connection: {error}", rank, gone=True) from None
            if message is None:
                raise self._lose_rank(f"did not answer within {timeout_s:.0f} s", rank)
            self._record(rank, message)
            if isinstance(message, kind):
                return message

    def _listen(self) -> None:
        """Process messages that have arrived, without waiting."""
        for rank, peer in self._peers.items():
            try:
                while (message := peer.receive(0.0)) is not None:
                    self._record(rank, message)
            except OSError as error:
                raise self._lose_rank(f"lost its connection: {error}", rank, gone=True) from None

    def _record(self, rank: int, message: rank_ipc.Reply) -> None:
        if isinstance(message, rank_ipc.RankReport):
            self._reports[rank] = message
            self._asked = False
        elif isinstance(message, rank_ipc.RankError):
            lost = self._lose_rank(message.message, rank)
            raise LoadError(message.message) if message.permanent else lost

    def _lose_rank(self, reason: str, rank: int, gone: bool = False) -> RanksLost:
        self.lost = True
        return RanksLost(f"rank {rank}: {reason}", gone)

    def _failure_reason(self, failure: str) -> RanksLost:
        """Return why a collective failed: a rank exited or reported an error, or it failed here."""
        self.lost = True
        by_socket = {peer.socket: rank for rank, peer in self._peers.items()}
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            for connection in select.select([*by_socket], [], [], left_s)[0]:
                rank = by_socket[connection]
                try:
                    while (message := self._peers[rank].receive(0.0)) is not None:
                        if isinstance(message, rank_ipc.RankError):
                            return RanksLost(f"rank {rank}: {message.message}")
                except OSError:
                    return RanksLost(f"rank {rank} is gone: {failure}", gone=True)
        return RanksLost(f"a step of {self.shard.size} ranks failed on rank 0: {failure}")
