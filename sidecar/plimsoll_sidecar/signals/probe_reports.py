"""Asks the probes in an engine's processes, and says what their reports mean together.

Each probe listens on ``PID.sock`` in a shared folder. Whoever can write there can put anything in
its place: a peer is asked only where the kernel says that its socket belongs to that very process.
A report comes from the engine and is not trusted: whatever is not of this form is no report.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from plimsoll_api.admin import (
    DeviceMemory,
    LedgerEntry,
    MemoryKind,
    Number,
    ProcessMemory,
    Role,
)

PIECE = 1 << 16
REPORT_BYTES = 64 << 10
TEXT_BYTES = 4 << 20
"""Of one answer. A text of 1 MiB may grow fourfold as JSON."""
MAX_LINES = 32
MAX_DEVICES = 64
PINNED = "pinned_host"

Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Owner = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Uuid = Annotated[str, msgspec.Meta(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]{1,90}$")]
WORKERS = frozenset({"Worker", "Scheduler"})
NAMES = {
    "EngineCore": "EngineCore",
    "Worker": "Worker",
    "Scheduler": "scheduler",
    "Detokenizer": "detokenizer",
}
"""What the engines call the processes that a probe recognises."""


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


class ReportedOwner(msgspec.Struct):
    """One line of the engine's ledger: who holds how many bytes, and at most how many."""

    owner: Owner
    kind: MemoryKind
    bytes: Number
    bound: Number | None = None


class TorchDevice(msgspec.Struct):
    """What torch's allocator has on one device, in bytes."""

    index: Annotated[int, msgspec.Meta(ge=0, le=1023)]
    allocated: Number
    reserved: Number
    uuid: Uuid | None = None


class Inside(msgspec.Struct):
    """What the engine's own objects say in one of its known processes."""

    role: Annotated[str, msgspec.Meta(max_length=32)] = ""
    kv_usage_ratio: Ratio | None = None
    prefix_cache_ratio: Ratio | None = None
    steps_total: Number | None = None
    ledger: Annotated[list[ReportedOwner], msgspec.Meta(max_length=MAX_LINES)] = []


class Report(msgspec.Struct):
    """Sizes are bytes; what is absent is unknown."""

    pid: Number
    py_blocks: Number | None = None
    python_objects: Number | None = None
    malloc_in_use: Number | None = None
    malloc_retained: Number | None = None
    shared: Number | None = None
    host_pinned: Number | None = None
    devices: Annotated[list[TorchDevice], msgspec.Meta(max_length=MAX_DEVICES)] = []
    engine: Inside = msgspec.field(default_factory=Inside)
    cost_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    age_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def account(process: ProcessMemory, report: Report) -> ProcessMemory:
    """``process`` with its own account. One that runs the model is the worker."""
    runs = report.engine.role in WORKERS or any(
        line.owner == "weights" for line in report.engine.ledger
    )
    return ProcessMemory(
        role=Role.WORKER if runs and process.role is Role.OTHER else process.role,
        pid=process.pid,
        malloc_in_use=report.malloc_in_use,
        malloc_retained=report.malloc_retained,
        python_objects=report.python_objects,
        py_blocks=report.py_blocks,
        shared=report.shared,
        name=process.name or NAMES.get(report.engine.role),
    )


def ledger(accounts: Iterable[tuple[Role, Report]]) -> list[LedgerEntry]:
    """One entry an owner and kind: ranks are added up. Pinned memory has no bound of its own."""
    entries: dict[tuple[str, MemoryKind], LedgerEntry] = {}
    for role, report in accounts:
        lines = list(report.engine.ledger)
        if report.host_pinned:
            lines.append(ReportedOwner(PINNED, MemoryKind.HOST, report.host_pinned))
        for line in lines:
            key = line.owner, line.kind
            before = entries.get(key) or LedgerEntry(line.owner, line.kind, 0, 0, role)
            entries[key] = LedgerEntry(
                line.owner,
                line.kind,
                before.bytes + line.bytes,
                None if None in (before.bound, line.bound) else _sum(before.bound, line.bound),
                before.process,
            )
    return list(entries.values())[:MAX_LINES]


def devices(known: list[DeviceMemory], reports: Iterable[Report]) -> list[DeviceMemory]:
    """Return ``known`` with torch's figures, summed over the processes that use a device.

    The devices that the reports name where none is known.
    """
    sums: dict[str | int, TorchDevice] = {}
    for report in reports:
        for one in report.devices:
            key: str | int = one.uuid or one.index
            before = sums.get(key)
            sums[key] = TorchDevice(
                (before or one).index,
                one.allocated + (before.allocated if before else 0),
                one.reserved + (before.reserved if before else 0),
                one.uuid,
            )
    if not known:
        every = list(sums.values())[:MAX_DEVICES]
        indices = [one.index for one in every]
        # Each rank may call its own device 0.
        distinct = len(set(indices)) == len(indices)
        return [
            _device(DeviceMemory(one.index if distinct else at, one.uuid), one)
            for at, one in enumerate(every)
        ]
    return [_device(d, sums.get(d.uuid or "") or sums.get(d.index)) for d in known]


def _device(known: DeviceMemory, found: TorchDevice | None) -> DeviceMemory:
    if found is None:
        return known
    return msgspec.structs.replace(
        known, torch_allocated=found.allocated, torch_reserved=found.reserved
    )


def _sum(first: int | None, second: int | None) -> int:
    return (first or 0) + (second or 0)
