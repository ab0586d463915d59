"""Connections of rank 0 to the other ranks, for commands and replies."""

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
from plimsoll_engine.errors import LoadError, RanksLostError
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.framing import FrameReader
from plimsoll_engine.messages.zygote_ipc import make_rendezvous_paths

# The rank first completes all earlier commands.
REPLY_TIMEOUT_S = 30.0
# For 140 GB from a slow disk.
LOAD_TIMEOUT_S = 1800.0
SHUTDOWN_TIMEOUT_S = 10.0
# Time to find out which rank has failed, after a collective has failed.
FIND_LOST_RANK_TIMEOUT_S = 1.0

ReplyT = TypeVar("ReplyT", bound=rank_ipc.Reply)


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_TIMEOUT_S)
        self.socket = connection
        self._reader = FrameReader()
        self._received: deque[rank_ipc.Reply] = deque()

    def receive(self, timeout_s: float) -> rank_ipc.Reply | None:
        # Raises ConnectionError if the rank has exited.
        deadline = time.monotonic() + timeout_s
        while not self._received:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self.socket], [], [], left_s)[0]:
                return None
            if not (data := self.socket.recv(1 << 20)):
                raise ConnectionError("the rank closed it")
            self._received += map(rank_ipc.from_rank_decoder.decode, self._reader.feed(data))
        return self._received.popleft()


class Leader:
    """Connections of rank 0 to the other ranks, which exit when they are closed."""

    shard: Shard

    def __init__(self, run_dir: str | Path, epoch: int, num_ranks: int) -> None:
        self.shard = Shard(0, num_ranks)
        self.lost = False
        self._path, self.store = make_rendezvous_paths(run_dir, epoch)
        self._peers: dict[int, _Peer] = {}
        self._reports: dict[int, rank_ipc.RankReport] = {}
        self._report_requested = False
        # Remove the files of a killed predecessor. Other ranks retry until this one listens.
        self.store.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._listener.listen()

    def join_group(self) -> None:
        """Wait until all other ranks have initialised their device and connected."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while len(self._peers) < self.shard.size - 1:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                rank = self._find_missing_rank()
                raise self._mark_rank_lost(f"rank {rank} did not connect") from None
            peer = _Peer(connection)
            hello = self._receive_reply(
                peer, self._find_missing_rank(), rank_ipc.RankHello, deadline - time.monotonic()
            )
            self._peers[hello.rank] = peer

    def wait_until_loaded(self) -> None:
        """Wait until all other ranks have loaded their share of the model."""
        self._gather(rank_ipc.RankReady, LOAD_TIMEOUT_S)

    def send(self, command: rank_ipc.Command) -> None:
        """Send ``command`` to all other ranks. Raises RanksLostError if one has exited."""
        data = rank_ipc.encode_frame(command)
        for rank, peer in self._peers.items():
            try:
                peer.socket.sendall(data)
            except OSError as error:
                raise self._mark_rank_lost(
                    f"cannot send a command to rank {rank}: {error}", has_rank_exited=True
                ) from None

    def request_replies(self, command: rank_ipc.Command, reply_type: type[ReplyT]) -> list[ReplyT]:
        """Send ``command`` to all other ranks, and return their replies in rank order.

        Raises RanksLostError, or LoadError if a rank reports a permanent failure.
        """
        self.send(command)
        return self._gather(reply_type, REPLY_TIMEOUT_S)

    @contextlib.contextmanager
    def run_on_all_ranks(self, command: rank_ipc.Command) -> Iterator[None]:
        """Run the body of the ``with`` statement while all other ranks run ``command``.

        Raises RanksLostError after any exception in the body, because the other ranks wait in
        collectives.
        """
        self.send(command)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any error ends the group
            raise self._explain_failure(f"{type(error).__name__}: {error}") from None

    def get_memory_reports(self) -> list[rank_ipc.RankReport]:
        """Return the latest memory report of each other rank. Only the first call waits for it."""
        if not self._reports:
            self.request_replies(rank_ipc.ReportMemory(), rank_ipc.RankReport)
        elif not self._report_requested:
            self.send(rank_ipc.ReportMemory())
            self._report_requested = True
        else:
            self._listen()
        return [report for _, report in sorted(self._reports.items())]

    def take_standby_memory_reports(self) -> list[rank_ipc.RankReport]:
        """Return and discard the memory reports that the other ranks sent as a standby.

        Serving needs more memory, so :meth:`get_memory_reports` then waits for new reports.
        """
        reports = self.get_memory_reports()
        self._reports = {}
        return reports

    def release_pools(self) -> None:
        """Make the other ranks release their KV pools, unless a rank is lost."""
        with contextlib.suppress(RanksLostError, LoadError):
            if not self.lost:
                self.request_replies(rank_ipc.ReleasePool(), rank_ipc.Acknowledgement)

    def start_shutdown(self) -> None:
        """Send Shutdown to the other ranks without waiting for them."""
        with contextlib.suppress(RanksLostError):
            if not self.lost:
                self.send(rank_ipc.Shutdown())

    def wait_until_shut_down(self) -> list[rank_ipc.RankShutdownReport] | None:
        """Return the other ranks' reports on their remaining memory; None if a rank is lost."""
        if self.lost or len(self._peers) < self.shard.size - 1:
            return None
        try:
            return self._gather(rank_ipc.RankShutdownReport, SHUTDOWN_TIMEOUT_S)
        except (RanksLostError, LoadError):
            return None

    def close(self) -> None:
        """Close all connections, which makes the other ranks exit. Idempotent."""
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        self._listener.close()
        for path in (self._path, self.store):
            with contextlib.suppress(OSError):  # no such file, or a read-only directory
                path.unlink()

    # ---- steps

    def _find_missing_rank(self) -> int:
        return min(set(range(1, self.shard.size)) - self._peers.keys())

    def _gather(self, reply_type: type[ReplyT], timeout_s: float) -> list[ReplyT]:
        deadline = time.monotonic() + timeout_s
        return [
            self._receive_reply(peer, rank, reply_type, deadline - time.monotonic())
            for rank, peer in sorted(self._peers.items())
        ]

    def _receive_reply(
        self, peer: _Peer, rank: int, reply_type: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = peer.receive(max(0.0, deadline - time.monotonic()))
            except OSError as error:
                raise self._mark_rank_lost(
                    f"lost the connection to rank {rank}: {error}", has_rank_exited=True
                ) from None
            if message is None:
                raise self._mark_rank_lost(f"rank {rank} did not answer within {timeout_s:.0f} s")
            self._record(rank, message)
            if isinstance(message, reply_type):
                return message

    def _listen(self) -> None:
        for rank, peer in self._peers.items():
            try:
                while (message := peer.receive(0.0)) is not None:
                    self._record(rank, message)
            except OSError as error:
                raise self._mark_rank_lost(
                    f"lost the connection to rank {rank}: {error}", has_rank_exited=True
                ) from None

    def _record(self, rank: int, message: rank_ipc.Reply) -> None:
        if isinstance(message, rank_ipc.RankReport):
            self._reports[rank] = message
            self._report_requested = False
        elif isinstance(message, rank_ipc.RankError):
            lost = self._mark_rank_lost(f"rank {rank} failed: {message.message}")
            raise LoadError(message.message) if message.permanent else lost

    def _mark_rank_lost(self, message: str, has_rank_exited: bool = False) -> RanksLostError:
        self.lost = True
        return RanksLostError(message, has_rank_exited)

    def _explain_failure(self, failure: str) -> RanksLostError:
        self.lost = True
        by_socket = {peer.socket: rank for rank, peer in self._peers.items()}
        deadline = time.monotonic() + FIND_LOST_RANK_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            for connection in select.select([*by_socket], [], [], left_s)[0]:
                rank = by_socket[connection]
                try:
                    while (message := self._peers[rank].receive(0.0)) is not None:
                        if isinstance(message, rank_ipc.RankError):
                            return RanksLostError(f"rank {rank} failed: {message.message}")
                except OSError:
                    return RanksLostError(
                        f"rank {rank} has exited: {failure}", has_rank_exited=True
                    )
        return RanksLostError(f"a step on {self.shard.size} ranks failed on rank 0: {failure}")
