"""What a trim of an engine that is not ours gave back.

Measured before and after: that the server answered says only that it was asked.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from plimsoll_api.units import format_bytes
from plimsoll_sidecar.govern.command import Outcome
from plimsoll_sidecar.signals.process.resident_memory import resident, total

MIN_BYTES = 1 << 20
"""Less than this is what an engine that serves takes and gives back anyway."""


class TrimEffect(msgspec.Struct, frozen=True):
    """Bytes that came back, negative where memory grew meanwhile; None is unknown.

    ``devices`` says whether the engine has devices.
    """

    host: int | None
    device: int | None
    devices: bool

    @property
    def outcome(self) -> Outcome:
        """``Unknown`` where nothing came back of what could be measured, and not all could be."""
        if max(self.host or 0, self.device or 0) >= MIN_BYTES:
            return Outcome.SUCCEEDED
        unmeasured = self.host is None or (self.devices and self.device is None)
        return Outcome.UNKNOWN if unmeasured else Outcome.FAILED

    @property
    def summary(self) -> str:
        """The bytes that came back, as a sentence for the incident's timeline."""
        parts = [f"{_bytes(self.host)} of host memory"]
        if self.devices or self.device is not None:
            parts.append(f"{_bytes(self.device)} of device memory")
        return f"gave back {' and '.join(parts)}"


def trim_effect(
    before: int | None, after: int | None, device: int | None, devices: bool
) -> TrimEffect:
    """From what the engine held before and after the trim; ``device`` is what torch gave back."""
    host = None if before is None or after is None else before - after
    return TrimEffect(host, device, devices)


def held(pids: Iterable[int]) -> int | None:
    """Host memory of these processes that a trim can return; None where one cannot be read."""
    sizes = [resident(pid) for pid in pids]
    known = [size.anon + size.shmem + (size.swap or 0) for size in sizes if size is not None]
    return total(known) if known and len(known) == len(sizes) else None


def _bytes(size: int | None) -> str:
    return "an unknown amount" if size is None else format_bytes(max(0, size))
