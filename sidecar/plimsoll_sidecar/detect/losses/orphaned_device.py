"""Device memory that stays held after the engine's processes have died.

No living process of its container holds it, the next engine's included, which holds its own long
before it answers.

Only the whole device can be seen, so that on a device that is shared with other pods their memory
counts as well: this is told and never acted on.
"""

from __future__ import annotations

from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.trace import Sample
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.attribution.segments import device_segments, device_total

SETTLE_S = 30.0
"""Time for the driver to take back the memory of processes that ended."""
MIN_DEAD_BYTES = 2 << 30
"""NVML counts what the driver reserves for itself as used: some 600 MiB on large devices."""
MIN_MORE_BYTES = 1 << 30
CONFIDENCE = 0.7
SHARED = "the figure covers the whole device, including other pods that share it"


class OrphanWatch:
    """Watches what engines leave on their devices; it outlives epochs.

    What an engine leaves behind shows when it is gone, or when its successor finds more in use
    beside its own memory than it did itself.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._floor: int | None = None
        self._before: int | None = None
        self._since: float | None = None
        self._standing: Suspicion | None = None
        self._dead = False

    def update(self, sample: Sample) -> Suspicion | None:
        """Return what is held by nobody now; unknown figures change nothing."""
        if sample.epoch != self._epoch:
            self._epoch, self._since = sample.epoch, None
            self._before = self._before if self._floor is None else self._floor
            self._floor = None
        found = self._held(sample)
        if found is None:
            return self._standing
        size, least, evidence = found
        if size < least:
            self._since = self._standing = None
            return None
        self._since = sample.t if self._since is None else self._since
        if sample.t - self._since >= SETTLE_S:
            self._standing = Suspicion(
                kind=IncidentKind.ORPHAN_DEVICE_MEMORY,
                segment=Segment.ORPHAN,
                confidence=CONFIDENCE,
                consumed_ratio=0.0,
                bytes=size,
                evidence=[f"{format_bytes(size)} {evidence}", SHARED],
            )
        return self._standing

    def _held(self, sample: Sample) -> tuple[int, int, str] | None:
        """Bytes, from how many on they count, and what they are."""
        if self._dead and sample.host.processes:
            # Somebody lives who may hold it: the next engine, which has not answered yet.
            self._dead, self._standing, self._since = False, None, None
        used = device_total(sample)
        if used is None:
            return None
        if sample.host.processes == 0:
            self._dead = True
            return (
                used,
                MIN_DEAD_BYTES,
                "of device memory is in use, but no engine process is running",
            )
        beside = device_segments(sample).get(Segment.NON_TORCH)
        if beside is None:
            return None
        self._floor = beside if self._floor is None else min(self._floor, beside)
        if self._before is None:
            return None
        more = max(0, self._floor - self._before)
        return more, MIN_MORE_BYTES, "more than before the restart is in use outside the engine"
