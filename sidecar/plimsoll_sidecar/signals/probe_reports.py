"""Query the probes of an engine's processes, and merge their reports.

Any process that can write to the folder can replace the socket ``PID.sock``. A probe is therefore
queried only if the kernel confirms that the socket belongs to the process.
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

READ_CHUNK_BYTES = 1 << 16
MAX_REPORT_BYTES = 64 << 10
# As JSON, a text of 1 MiB may grow fourfold.
MAX_TEXT_BYTES = 4 << 20
MAX_OWNERS = 32
MAX_DEVICES = 64
PINNED_OWNER = "pinned_host"
# The memory that the probes themselves use during a diagnosis.
DIAGNOSTICS_OWNER = "diagnostics"

Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Owner = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Uuid = Annotated[str, msgspec.Meta(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]{1,90}$")]
# The processes that run the model.
WORKER_ROLES = frozenset({"Worker", "Scheduler"})
# The engine's own names, by the role in the probe's report.
PROCESS_NAMES = {
    "EngineCore": "EngineCore",
    "Worker": "Worker",
    "Scheduler": "scheduler",
    "Detokenizer": "detokenizer",
}


class ProbeRequests:
    """Pending requests to probes, each on its own connection.

    A busy process may answer later than a sample can wait. A later sample then collects the answer.
    """

    def __init__(self, max_bytes: int = MAX_REPORT_BYTES) -> None:
        self._limit = max_bytes
        self._connections: dict[int, socket.socket] = {}
        self._data: dict[int, bytearray] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any answer is pending."""
        return bool(self._connections)

    def send(self, folder: Path, pid: int, request: bytes) -> bool:
        """Send a request, in place of a pending one. Return False without a probe."""
        self.drop(pid)
        connection = _connect_to_probe(folder / f"{pid}.sock", pid)
        if connection is None or not _send_request(connection, request):
            return False
        self._connections[pid], self._data[pid] = connection, bytearray()
        return True

    def collect(self, awaited_pids: Iterable[int], timeout_s: float) -> dict[int, bytes]:
        """Return the complete answers by PID; empty bytes for a failed request.

        Wait up to ``timeout_s``, but only for ``awaited_pids``; others may have answered already.
        """
        deadline = time.monotonic() + timeout_s
        answers: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for pid, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, pid)
            left = {pid for pid in awaited_pids if pid in self._connections}
            while self._connections:
                wait_s = max(0.0, deadline - time.monotonic()) if left else 0.0
                ready = selector.select(wait_s)
                for key, _ in ready:
                    ended = _read_once(
                        self._connections[key.data], self._data[key.data], self._limit
                    )
                    if ended is None:
                        continue
                    answers[key.data] = bytes(self._data[key.data]) if ended else b""
                    selector.unregister(key.fileobj)
                    self.drop(key.data)
                    left.discard(key.data)
                if not ready or time.monotonic() > deadline:
                    break
        return answers

    def drop(self, pid: int) -> None:
        """Drop the pending request to ``pid``, if there is one."""
        connection = self._connections.pop(pid, None)
        if connection is not None:
            del self._data[pid]
            connection.close()

    def close(self) -> None:
        """Drop all pending requests."""
        for pid in list(self._connections):
            self.drop(pid)


def query_probes(
    folder: Path,
    pids: Iterable[int],
    request: bytes,
    timeout_s: float,
    max_bytes: int = MAX_REPORT_BYTES,
) -> dict[int, bytes]:
    """Return the answers that arrive completely within ``timeout_s``, by PID."""
    exchange = ProbeRequests(max_bytes)
    queried_pids = [pid for pid in pids if exchange.send(folder, pid, request)]
    try:
        return {
            pid: data for pid, data in exchange.collect(queried_pids, timeout_s).items() if data
        }
    finally:
        exchange.close()


def _connect_to_probe(path: Path, pid: int) -> socket.socket | None:
    # A socket that belongs to another process is not used.
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not blocking: a full queue raises EAGAIN at once.
        connection.setblocking(False)
        connection.connect(str(path))
        size = struct.calcsize("3i")
        owner = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if owner[0] == pid:
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _send_request(connection: socket.socket, request: bytes) -> bool:
    # A short request fits into the socket's buffer at once; otherwise, the connection is closed.
    try:
        if connection.send(request) == len(request):
            return True
    except OSError:
        pass
    connection.close()
    return False


def _read_once(connection: socket.socket, data: bytearray, max_bytes: int) -> bool | None:
    # Returns True if the answer is complete, False after a failure, and None if more data follows.
    try:
        piece = connection.recv(READ_CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return False
    if not piece:
        return bool(data)
    data += piece
    return False if len(data) > max_bytes else None


class ReportedOwner(msgspec.Struct):
    """One entry of the engine's ledger: an owner, its bytes and its bound."""

    owner: Owner
    kind: MemoryKind
    bytes: Number
    bound: Number | None = None


class TorchDevice(msgspec.Struct):
    """Memory of torch's allocator on one device, in bytes."""

    index: Annotated[int, msgspec.Meta(ge=0, le=1023)]
    allocated: Number
    reserved: Number
    uuid: Uuid | None = None


class ProbeMemory(msgspec.Struct):
    """Memory of a running diagnosis in bytes: the present use, and the maximum."""

    bytes: Number
    bound: Number


class EngineReport(msgspec.Struct):
    """Values that a probe read from the engine's objects in one process."""

    role: Annotated[str, msgspec.Meta(max_length=32)] = ""
    kv_usage_ratio: Ratio | None = None
    prefix_cache_ratio: Ratio | None = None
    steps_total: Number | None = None
    ledger: Annotated[list[ReportedOwner], msgspec.Meta(max_length=MAX_OWNERS)] = []


class Report(msgspec.Struct):
    """Report of one process. Sizes are in bytes; None if unknown."""

    pid: Number
    py_blocks: Number | None = None
    python_objects: Number | None = None
    malloc_in_use: Number | None = None
    malloc_retained: Number | None = None
    shared: Number | None = None
    host_pinned: Number | None = None
    devices: Annotated[list[TorchDevice], msgspec.Meta(max_length=MAX_DEVICES)] = []
    engine: EngineReport = msgspec.field(default_factory=EngineReport)
    diagnostics: ProbeMemory | None = None
    cost_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    age_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def merge_process(process: ProcessMemory, report: Report) -> ProcessMemory:
    """Return ``process`` with its reported memory, as a worker if it runs the model."""
    runs = report.engine.role in WORKER_ROLES or any(
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
        name=process.name or PROCESS_NAMES.get(report.engine.role),
    )


def merge_ledgers(reports: Iterable[tuple[Role, Report]]) -> list[LedgerEntry]:
    """Return one ledger entry for each owner and kind of memory, summed over the ranks."""
    entries: dict[tuple[str, MemoryKind], LedgerEntry] = {}
    for role, report in reports:
        lines = list(report.engine.ledger)
        if report.host_pinned:
            lines.append(ReportedOwner(PINNED_OWNER, MemoryKind.HOST, report.host_pinned))
        diagnostics = report.diagnostics
        if diagnostics is not None:
            lines.append(
                ReportedOwner(
                    DIAGNOSTICS_OWNER, MemoryKind.HOST, diagnostics.bytes, diagnostics.bound
                )
            )
        for line in lines:
            key = line.owner, line.kind
            before = entries.get(key) or LedgerEntry(line.owner, line.kind, 0, 0, role)
            entries[key] = LedgerEntry(
                line.owner,
                line.kind,
                before.bytes + line.bytes,
                None
                if None in (before.bound, line.bound)
                else _add_sizes(before.bound, line.bound),
                before.process,
            )
    return list(entries.values())[:MAX_OWNERS]


def merge_devices(devices: list[DeviceMemory], reports: Iterable[Report]) -> list[DeviceMemory]:
    """Return ``devices``, or else the reported devices, with torch's memory."""
    sums: dict[str | int, TorchDevice] = {}
    for report in reports:
        for torch_device in report.devices:
            key: str | int = torch_device.uuid or torch_device.index
            before = sums.get(key)
            sums[key] = TorchDevice(
                (before or torch_device).index,
                torch_device.allocated + (before.allocated if before else 0),
                torch_device.reserved + (before.reserved if before else 0),
                torch_device.uuid,
            )
    if not devices:
        every = list(sums.values())[:MAX_DEVICES]
        indices = [device.index for device in every]
        # Each rank may name its own device 0.
        distinct = len(set(indices)) == len(indices)
        return [
            _add_torch_memory(DeviceMemory(device.index if distinct else at, device.uuid), device)
            for at, device in enumerate(every)
        ]
    return [_add_torch_memory(d, sums.get(d.uuid or "") or sums.get(d.index)) for d in devices]


def _add_torch_memory(device: DeviceMemory, torch_memory: TorchDevice | None) -> DeviceMemory:
    if torch_memory is None:
        return device
    return msgspec.structs.replace(
        device, torch_allocated=torch_memory.allocated, torch_reserved=torch_memory.reserved
    )


def _add_sizes(first: int | None, second: int | None) -> int:
    return (first or 0) + (second or 0)
