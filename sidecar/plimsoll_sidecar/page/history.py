"""Memory over time, in a bounded number of points however long the supervisor runs."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass

from plimsoll_api.assessment import Assessment, BudgetState, Segment

POINTS = 240
SEGMENTS = tuple(Segment)
UNKNOWN = -1
_HOST, _DEVICE, _HOST_GROWTH, _DEVICE_GROWTH = range(len(SEGMENTS), len(SEGMENTS) + 4)
WIDTH = len(SEGMENTS) + 4


@dataclass(frozen=True)
class HistoryPoint:
    """Baseline and unexplained growth of host and device; what is unknown is absent or None."""

    at: float
    segments: dict[Segment, int]
    host_baseline: int | None
    device_baseline: int | None
    host_growth: int | None
    device_growth: int | None


class History:
    """Written by one thread, read by others.

    When it is full every other point goes and the spacing doubles: the whole run stays visible. All
    memory is taken at the begin: arrays that grow and shrink leave holes in the heap, for years.
    """

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._every, self._skipped = 1, 0
        self._count = 0
        self._times = array("d", [0.0]) * points
        self._values = array("q", [UNKNOWN]) * (points * WIDTH)
        self._lock = threading.Lock()

    def add(self, at: float, seen: Assessment) -> None:
        """One sample; most are skipped once the run is long."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        row = [seen.segments.get(segment, UNKNOWN) for segment in SEGMENTS]
        row += [_baseline(seen.host), _baseline(seen.reserved or seen.device)]
        row += [_growth(seen.host), _growth(seen.device)]
        with self._lock:
            self._times[self._count] = at
            self._values[self._count * WIDTH : (self._count + 1) * WIDTH] = array("q", row)
            self._count += 1
            if self._count == self._points:
                self._halve()

    def points(self) -> list[HistoryPoint]:
        """All points, oldest first."""
        with self._lock:
            times, values = self._times[: self._count], self._values[: self._count * WIDTH]
        rows = (values[start : start + WIDTH].tolist() for start in range(0, len(values), WIDTH))
        return [_point(at, row) for at, row in zip(times, rows, strict=True)]

    def _halve(self) -> None:
        self._count = (self._count + 1) // 2  # the start of the run stays
        for to in range(self._count):
            self._times[to] = self._times[2 * to]
            self._values[to * WIDTH : (to + 1) * WIDTH] = self._values[
                2 * to * WIDTH : (2 * to + 1) * WIDTH
            ]
        self._every *= 2


def _baseline(state: BudgetState | None) -> int:
    return UNKNOWN if state is None or state.baseline is None else state.baseline


def _growth(state: BudgetState | None) -> int:
    return UNKNOWN if state is None or state.unexplained is None else max(state.unexplained, 0)


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _point(at: float, row: list[int]) -> HistoryPoint:
    return HistoryPoint(
        at=at,
        segments={s: v for s, v in zip(SEGMENTS, row, strict=False) if v != UNKNOWN},
        host_baseline=_known(row[_HOST]),
        device_baseline=_known(row[_DEVICE]),
        host_growth=_known(row[_HOST_GROWTH]),
        device_growth=_known(row[_DEVICE_GROWTH]),
    )
