"""What a standby worker holds of host and devices, as the engine's ledger has it.

It is in the ledger from its fork on: a supervisor that watches a leak meanwhile would take its
preparation for growth.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.admin import DeviceMemory, LedgerEntry, MemoryKind, ProcessMemory, Role

OWNER = "standby_worker"
SETTLED_REPORTS = 2
"""The serving worker's report that counts what a standby takes of the devices: the first one may
have been written before the standby was prepared."""


class StandbyMemory:
    """The standbys of one epoch, one after the other."""

    def __init__(self) -> None:
        self._without: int | None = None
        self._taken: int | None = None
        self._settled = 0
        self._bounds: dict[MemoryKind, int] = {}

    def begin(self, devices: Sequence[DeviceMemory]) -> None:
        """Take in how the serving worker saw its ``devices`` before the standby was forked."""
        self._without, self._taken, self._settled = beyond_torch(devices), None, 0

    def seen(self, devices: Sequence[DeviceMemory], prepared: bool) -> None:
        """Take in how it sees them now. A standby that is prepared takes no more."""
        if self._settled >= SETTLED_REPORTS:
            return
        self._settled += prepared
        after = beyond_torch(devices)
        if None not in (self._without, after):
            self._taken = max(0, (after or 0) - (self._without or 0))

    def entries(self, processes: Sequence[ProcessMemory]) -> list[LedgerEntry]:
        """Return the ledger's entries; ``processes`` are the standby's, none where there is none.

        One that was given back stays as an owner that holds nothing: the growth that it explained
        has gone with it.
        """
        private = [process.private for process in processes]
        known = [size for size in private if size is not None]
        held = {
            MemoryKind.HOST: sum(known) if len(known) == len(private) else None,
            MemoryKind.DEVICE: self._taken if processes else 0,
        }
        entries = []
        for kind, size in held.items():
            if size is None or (not size and kind not in self._bounds):
                continue
            bound = self._bounds[kind] = max(size, self._bounds.get(kind, 0))
            entries.append(LedgerEntry(f"{OWNER}_{kind}", kind, size, bound, Role.WORKER))
        return entries


def beyond_torch(devices: Sequence[DeviceMemory]) -> int | None:
    """Return the used bytes of all devices that are not the serving worker's allocator's.

    None where one is unknown, and without a device.
    """
    found = 0
    for device in devices:
        if device.used is None or device.torch_reserved is None:
            return None
        found += device.used - device.torch_reserved
    return found if devices else None
