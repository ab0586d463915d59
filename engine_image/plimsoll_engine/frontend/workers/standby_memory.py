"""Host and device memory of a standby worker, for the engine's ledger.

The ledger counts it from the fork on. Otherwise a supervisor would mistake the preparation of a
standby for a leak.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.admin import DeviceMemory, LedgerEntry, MemoryKind, ProcessMemory, Role

STANDBY_OWNER = "standby_worker"
SETTLED_REPORTS = 2
"""Number of the serving worker's reports after which its device memory certainly includes a
prepared standby. The first one may have been written before the standby was ready.
"""


class StandbyMemory:
    """Memory of the successive standbys of one epoch."""

    def __init__(self) -> None:
        self._without: int | None = None
        self._taken: int | None = None
        self._settled = 0
        self._bounds: dict[MemoryKind, int] = {}

    def begin(self, devices: Sequence[DeviceMemory]) -> None:
        """Record the device memory before the standby is forked."""
        self._without, self._taken, self._settled = count_bytes_outside_torch(devices), None, 0

    def update(self, devices: Sequence[DeviceMemory], prepared: bool) -> None:
        """Record the device memory while the standby runs.

        Once it is ``prepared``, the standby uses no more memory.
        """
        if self._settled >= SETTLED_REPORTS:
            return
        self._settled += prepared
        after = count_bytes_outside_torch(devices)
        if None not in (self._without, after):
            self._taken = max(0, (after or 0) - (self._without or 0))

    def list_ledger_entries(self, processes: Sequence[ProcessMemory]) -> list[LedgerEntry]:
        """Return the ledger entries of the standby with these ``processes``.

        ``processes`` is empty if no standby exists. A stopped standby stays in the ledger with 0
        bytes, because its memory is gone as well.
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
            entries.append(LedgerEntry(f"{STANDBY_OWNER}_{kind}", kind, size, bound, Role.WORKER))
        return entries


def count_bytes_outside_torch(devices: Sequence[DeviceMemory]) -> int | None:
    """Return the used bytes of all devices, minus those of the serving worker's PyTorch allocator.

    Return None if a value is unknown or no device exists.
    """
    found = 0
    for device in devices:
        if device.used is None or device.torch_reserved is None:
            return None
        found += device.used - device.torch_reserved
    return found if devices else None
