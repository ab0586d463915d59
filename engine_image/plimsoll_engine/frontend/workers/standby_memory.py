"""Host and device memory of a standby worker, for the engine's ledger.

Without it, a supervisor would mistake the preparation of a standby for a leak.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.admin import DeviceMemory, LedgerEntry, MemoryKind, ProcessMemory, Role

STANDBY_OWNER = "standby_worker"
# The serving worker may have written the first report before the standby was ready.
PREPARED_REPORTS_UNTIL_FINAL = 2


class StandbyMemory:
    """Memory of the standbys of one epoch, which run one after another."""

    def __init__(self) -> None:
        self._used_before: int | None = None
        self._device_bytes: int | None = None
        self._settled = 0
        self._bounds: dict[MemoryKind, int] = {}

    def begin(self, devices: Sequence[DeviceMemory]) -> None:
        """Record the device memory in use before the standby is forked."""
        self._used_before = count_bytes_outside_torch(devices)
        self._device_bytes, self._settled = None, 0

    def update(self, devices: Sequence[DeviceMemory], is_prepared: bool) -> None:
        """Update the estimate of the standby's device memory from the memory in use."""
        if self._settled >= PREPARED_REPORTS_UNTIL_FINAL:
            return
        self._settled += is_prepared
        after = count_bytes_outside_torch(devices)
        if None not in (self._used_before, after):
            self._device_bytes = max(0, (after or 0) - (self._used_before or 0))

    def list_ledger_entries(self, processes: Sequence[ProcessMemory]) -> list[LedgerEntry]:
        """Return the ledger entries of the standby, with 0 bytes once it has stopped."""
        private = [process.private for process in processes]
        known = [size for size in private if size is not None]
        held = {
            MemoryKind.HOST: sum(known) if len(known) == len(private) else None,
            MemoryKind.DEVICE: self._device_bytes if processes else 0,
        }
        entries = []
        for kind, size in held.items():
            if size is None or (not size and kind not in self._bounds):
                continue
            bound = self._bounds[kind] = max(size, self._bounds.get(kind, 0))
            entries.append(LedgerEntry(f"{STANDBY_OWNER}_{kind}", kind, size, bound, Role.WORKER))
        return entries


def count_bytes_outside_torch(devices: Sequence[DeviceMemory]) -> int | None:
    """Return the bytes in use on all devices, except those of the serving worker's allocator.

    Return None if a value is unknown or there is no device.
    """
    total = 0
    for device in devices:
        if device.used is None or device.torch_reserved is None:
            return None
        total += device.used - device.torch_reserved
    return total if devices else None
