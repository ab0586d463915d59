"""Asks the probes in an engine's processes, all at once and within bounds.

Each listens on ``PID.sock`` in a shared folder. Whoever can write there can put anything in its
place: a peer is asked only where the kernel says that its socket belongs to that very process.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

PIECE = 1 << 16
REPORT_BYTES = 64 << 10
TEXT_BYTES = 4 << 20
"""Of one answer. A text of 1 MiB may grow fourfold as JSON."""


class Exchange:
    """Requests under way with probes, each over a connection of its own.

    A process that is busy with its own work, or that gets little processor time, answers later
    than a sample may wait: its answer is collected in a later round.
    """

    def __init__(self, limit: int = REPORT_BYTES) -> None:
        self._limit = limit
        self._peers: dict[int, socket.socket] = {}
        self._data: dict[int, bytearray] = {}

    @property
    def waits(self) -> bool:
        """Whether any answer is still to come."""
        return bool(self._peers)

    def begin(self, folder: Path, pid: int, request: bytes) -> bool:
        """Ask ``pid``, in place of what it was asked before; False where it has no probe."""
        self.drop(pid)
        peer = _connect(folder / f"{pid}.sock", pid)
        if peer is None or not _send(peer, request):
            return False
        self._peers[pid], self._data[pid] = peer, bytearray()
        return True

    def collect(self, waited: Iterable[int], timeout_s: float) -> dict[int, bytes]:
        """Return the answers that are complete by now, by process; empty for one that failed.

        Waits for those of ``waited``, ``timeout_s`` at most.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for pid, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, pid)
            left = {pid for pid in waited if pid in self._peers}
            while self._peers:
                wait_s = max(0.0, deadline - time.monotonic()) if left else 0.0
                ready = selector.select(wait_s)
                for key, _ in ready:
                    ended = _read(self._peers[key.data], self._data[key.data], self._limit)
                    if ended is None:
                        continue
                    found[key.data] = bytes(self._data[key.data]) if ended else b""
                    selector.unregister(key.fileobj)
                    self.drop(key.data)
                    left.discard(key.data)
                if not ready or time.monotonic() > deadline:
                    break
        return found

    def drop(self, pid: int) -> None:
        """Wait no more for an answer of ``pid``."""
        peer = self._peers.pop(pid, None)
        if peer is not None:
            del self._data[pid]
            peer.close()

    def close(self) -> None:
        """Drop every connection; a probe that lives connects again when it is asked."""
        for pid in list(self._peers):
            self.drop(pid)


def ask_all(
    folder: Path, pids: Iterable[int], request: bytes, timeout_s: float, limit: int = REPORT_BYTES
) -> dict[int, bytes]:
    """Return the whole answers that came in time, by process; whoever failed is absent.

    Never raises for what a peer does. It takes ``timeout_s`` at most, however many are asked.
    """
    exchange = Exchange(limit)
    asked = [pid for pid in pids if exchange.begin(folder, pid, request)]
    try:
        return {pid: data for pid, data in exchange.collect(asked, timeout_s).items() if data}
    finally:
        exchange.close()


def _connect(path: Path, pid: int) -> socket.socket | None:
    """Return a connection to what ``pid`` itself listens on; None where there is none."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not blocking: a full queue is EAGAIN, and nobody waits.
        peer.setblocking(False)
        peer.connect(str(path))
        size = struct.calcsize("3i")
        owner = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if owner[0] == pid:
            return peer
    except OSError:
        pass
    peer.close()
    return None


def _send(peer: socket.socket, request: bytes) -> bool:
    """Send a request, a few bytes: a socket that does not take them at once is not used."""
    try:
        if peer.send(request) == len(request):
            return True
    except OSError:
        pass
    peer.close()
    return False


def _read(peer: socket.socket, data: bytearray, limit: int) -> bool | None:
    """Read on: True at the end of a whole answer, False where it failed, None before.

    None says that more is to come.
    """
    try:
        piece = peer.recv(PIECE)
    except BlockingIOError:
        return None
    except OSError:
        return False
    if not piece:
        return bool(data)
    data += piece
    return False if len(data) > limit else None
