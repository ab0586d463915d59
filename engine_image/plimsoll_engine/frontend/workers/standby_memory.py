"""Host and device memory of a standby worker, for the engine's ledger.

The ledger counts it from its fork on. Otherwise a supervisor that watches for a leak would take the
standby's preparation for growth.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.admin import DeviceMemory, LedgerEntry, MemoryKind, ProcessMemory, Role

OWNER = "standby_worker"
SETTLED_REPORTS = 2
"""Reports of the serving worker until its device figures include a prepared standby.

The first report may have been written before the standby was ready.
"""


class StandbyMemory:
    """Memory of the consecutive standbys of one epoch."""

    def __init__(self) -> None:
        self._without: int | None = None
        self._taken: int | None = None
        self._settled = 0
        self._bounds: dict[MemoryKind, int] = {}

    def begin(self, devices: Sequence[DeviceMemory]) -> None:
        """Record the serving worker's ``devices`` before the standby is forked."""
        self._without, self._taken, self._settled = beyond_torch(devices), None, 0

    def update(self, devices: Sequence[DeviceMemory], prepared: bool) -> None:
        """Record the serving worker's ``devices`` while the standby runs.

        The standby uses no more memory once it is ``prepared``.
        """
        if self._settled >= SETTLED_REPORTS:
            return
        self._settled += prepared
        after = beyond_torch(devices)
        if None not in (self._without, after):
            self._taken = max(0, (after or 0) - (self._without or 0))

    def entries(self, processes: Sequence[ProcessMemory]) -> list[LedgerEntry]:
        """Return the ledger entries of the standby with these ``processes``.

        ``processes`` is empty if there is no standby. A standby that was stopped stays in the
        ledger with 0 bytes, because the growth that it explained is gone as well.
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
    """Return the used bytes of all devices, without the serving worker's PyTorch allocator.

    None if a value is unknown or there is no device.
    """
    found = 0
    for device in devices:
        if device.used is None or device.torch_reserved is None:
            return None
        found += device.used - device.torch_reserved
    return found if devices else None
