"""What one process's probe reports, and what the reports of an engine's processes say together.

A report comes from the engine and is not trusted: whatever is not of this form is no report.
"""

from __future__ import annotations

from collections.abc import Iterable
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
