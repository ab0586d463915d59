"""Memory after warm-up, and growth since then at comparable load.

A service under load needs more memory than an idle one, so there is a base for each *class* of load
(0, 1, 2–3, 4–7, … requests). A class that is met for the first time later gets its base from its
first floors, less the growth that was known by then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from plimsoll_sidecar.detect.trend import Point, unexplained

SETTLED_FLOORS = 8
SETTLED_BYTES = 4 << 20
"""The floor has settled when the later half of the floors is above the earlier by less: pymalloc
and glibc take memory in steps of 1 MiB."""
MAX_WARMUPS = 3.0
"""A warm-up that does not settle ends after this multiple of its length."""
LEAK_SHARE = 0.33
"""A rise of this share of the budget after the minimal warm-up is no warm-up any more."""
CLASS_SETTLE_S = 45.0
"""Requests that came together need this long to reach their full size."""
CLASS_SLACK = 1.25
"""A load above a class by less than this still belongs to it, so that 7 and 8 do not alternate."""
WAIT_FOR_LOAD_S = 900.0
"""Warm-up starts when the engine first reports its load, at the latest after this time."""


class Warmup:
    """Ends by evidence: the least time has passed and the floor has settled, with a maximum."""

    def __init__(self, least_s: float, budget: int | None, interval_s: float) -> None:
        self.least_s = least_s
        self.budget = budget
        self.floor: Point | None = None
        self.climbing = False
        self._began: float | None = None
        self._first_seen: float | None = None
        self._slice_s = max(interval_s, least_s / 8)
        self._slice: Point | None = None
        self._slice_end = 0.0
        self._floors: deque[Point] = deque(maxlen=SETTLED_FLOORS)

    def add(self, point: Point) -> bool:
        """True once warm: ``floor`` is the base, ``climbing`` says that it never settled."""
        if self._first_seen is None:
            self._first_seen = point.t
        if self._began is None:
            waited = point.t - self._first_seen
            if point.load is None and waited < min(WAIT_FOR_LOAD_S, 10 * self.least_s):
                return False
            self._began = point.t
        self._take(point)
        elapsed = point.t - self._began
        if elapsed < self.least_s:
            return False
        if self.floor is None:
            self.floor = self._floors[-1] if self._floors else point
        if self.least_s <= 0 or self._settled():
            self.floor = min((*self._floors, point), key=lambda p: p.bytes)
            return True
        rise = unexplained(self.floor, point)
        leaking = self.budget is not None and rise >= LEAK_SHARE * self.budget
        self.climbing = leaking or elapsed >= MAX_WARMUPS * self.least_s
        return self.climbing

    def _take(self, point: Point) -> None:
        if self._slice is not None and point.t >= self._slice_end:
            self._floors.append(self._slice)
            self._slice = None
        if self._slice is None:
            self._slice, self._slice_end = point, point.t + self._slice_s
        elif point.bytes < self._slice.bytes:
            self._slice = point

    def _settled(self) -> bool:
        if len(self._floors) < SETTLED_FLOORS:
            return False
        half, floors = SETTLED_FLOORS // 2, list(self._floors)
        earlier = min(floors[:half], key=lambda p: p.bytes)
        later = min(floors[half:], key=lambda p: p.bytes)
        return unexplained(earlier, later) <= SETTLED_BYTES


class Baseline:
    """The base of each class of load, and the growth above it."""

    def __init__(self, floor: Point) -> None:
        self.growth = 0
        self.explained = 0
        self.base = floor.bytes
        self._bases = {_class(floor.load): floor}
        self._entering: tuple[int, float, Point] | None = None

    @property
    def bases(self) -> list[Point]:
        """The base of each class of load."""
        return list(self._bases.values())

    @classmethod
    def of(cls, bases: list[Point]) -> Baseline:
        """A baseline with ``bases`` (at least one), as :attr:`bases` gave them."""
        baseline = cls(bases[0])
        baseline._bases = {_class(base.load): base for base in bases}
        return baseline

    def update(self, floor: Point) -> None:
        """Takes in the floor of the last seconds."""
        base = self._base(floor.load)
        if base is None:
            base = self._enter(_class(floor.load), floor)
            if base is None:
                return
        self._entering = None
        self.base = base.bytes
        self.growth = unexplained(base, floor)
        self.explained = max(0, floor.declared - base.declared)

    def settling(self) -> bool:
        """Whether load has just risen higher than ever before: nothing can be compared yet."""
        return self._entering is not None and self._entering[0] > max(self._bases)

    def _base(self, load: int | None) -> Point | None:
        """The base of the load's class, or of the one just below where the load hardly differs."""
        base = self._bases.get(_class(load))
        if base is None and load is not None:
            base = self._bases.get(_class(int(load / CLASS_SLACK)))
        return base

    def _enter(self, number: int, floor: Point) -> Point | None:
        since, highest = floor.t, floor
        if self._entering is not None:
            # The time counts from the first class that was new, or load between two never settles.
            entered, since, before = self._entering
            if entered == number and before.bytes > floor.bytes:
                highest = before
        self._entering = (number, since, highest)
        if floor.t - since < CLASS_SETTLE_S:
            return None
        base = replace(highest, bytes=highest.bytes - max(0, self.growth))
        self._bases[number] = base
        return base


def _class(load: int | None) -> int:
    return -1 if load is None else max(0, load).bit_length()
