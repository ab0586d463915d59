"""What can be said of a device from outside of the engine."""

from __future__ import annotations

from typing import Protocol

import msgspec


class DeviceBytes(msgspec.Struct, frozen=True):
    """Of the whole device."""

    used: int
    total: int


class DeviceSource(Protocol):
    def memory(self, uuid: str) -> DeviceBytes | None:
        """Memory of the device ``uuid`` (``GPU-…`` or ``MIG-…``); None where it is unknown."""
