"""Device memory that stays held after the engine's processes have died.

Only the whole device can be seen, so that on a device that is shared with other pods their memory
counts as well: this is told and never acted on.
"""

from __future__ import annotations

from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.assessment import Kind, Segment, Suspicion
from plimsoll_sidecar.detect.segments import device_segments, device_total
from plimsoll_sidecar.trace import Sample

SETTLE_S = 30.0
"""Time for the driver to take back the memory of processes that ended."""
DEAD_LEAST_BYTES = 2 << 30
"""NVML counts what the driver reserves for itself as used: some 600 MiB on large devices."""
MORE_LEAST_BYTES = 1 << 30
CONFIDENCE = 0.7
SHARED = "the figure is of the whole device: another pod that shares it would count as well"


class OrphanWatch:
    """Outlives epochs: what an engine leaves behind shows when it is gone, or when its successor
    finds more in use beside its own memory than it did itself."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._floor: int | None = None
        self._before: int | None = None
        self._since: float | None = None
        self._standing: Suspicion | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """What is held by nobody now; unknown figures change nothing."""
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
                kind=Kind.ORPHAN_DEVICE_MEMORY,
                segment=Segment.ORPHAN,
                confidence=CONFIDENCE,
                consumed_ratio=0.0,
                bytes=size,
                evidence=[f"{format_bytes(size)} {evidence}", SHARED],
            )
        return self._standing

    def _held(self, sample: Sample) -> tuple[int, int, str] | None:
        """Bytes, from how many on they count, and what they are."""
        used = device_total(sample)
        if used is None:
            return None
        if sample.host.processes == 0:
            return used, DEAD_LEAST_BYTES, "of device memory are in use and no engine process lives"
        beside = device_segments(sample).get(Segment.NON_TORCH)
        if beside is None:
            return None
        self._floor = beside if self._floor is None else min(self._floor, beside)
        if self._before is None:
            return None
        more = max(0, self._floor - self._before)
        return more, MORE_LEAST_BYTES, "more than before the restart are held beside the engine"
