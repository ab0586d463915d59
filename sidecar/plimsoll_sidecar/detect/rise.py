"""How much one segment of memory rose, to say which of them grew: no trend, and little memory."""

from __future__ import annotations

from collections import deque

from plimsoll_sidecar.detect.growth import BUCKETS, Bucket, widths
from plimsoll_sidecar.detect.trend import Point, unexplained


class Rise:
    """From the oldest floor of the widest buckets that are full to the newest of the narrowest."""

    def __init__(self, interval_s: float) -> None:
        self._widths = widths(interval_s)
        self._buckets: list[Bucket] = []
        self._widest = -1
        self._oldest: deque[Point] = deque(maxlen=BUCKETS)
        self._newest: Point | None = None
        self.forget()

    def add(self, point: Point) -> None:
        for index, bucket in enumerate(self._buckets):
            floor = bucket.add(point)
            if floor is None:
                continue
            if index == 0:
                self._newest = floor
            if index > self._widest:
                self._widest = index
                self._oldest.clear()
                self._oldest.append(floor)
            elif index == len(self._buckets) - 1:
                self._oldest.append(floor)

    def forget(self) -> None:
        """Begins anew with the next sample."""
        self._buckets = [Bucket(width) for width in self._widths]
        self._widest = -1
        self._oldest.clear()
        self._newest = None

    @property
    def bytes(self) -> int:
        """Growth that the ledger does not declare; 0 before the first bucket is full."""
        return unexplained(self._oldest[0], self._newest) if self._newest is not None else 0
