"""Measure the memory of a warm engine, and its later growth at comparable load.

Loads are grouped into classes (0, 1, 2-3, 4-7, ... requests), and each class has its own base.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll_sidecar.detect.growth import Point, is_load_comparable, measure_unexplained_growth

MIN_SETTLING_FLOORS = 8
"""Number of floors from which memory can be called settled."""
MAX_SETTLED_RISE_BYTES = 4 << 20
"""Maximum rise from the earlier to the later half of the floors of settled memory. pymalloc and
glibc take memory in steps of 1 MiB."""
MAX_WARMUP_FACTOR = 2.0
"""Maximum length of a warm-up, as a multiple of its configured length. Most leaks start with the
first request, and a warm-up that waited for memory to settle would hide them."""
MAX_SLOWING_HALVES_RATIO, MAX_SETTLED_HALVES_RATIO = 0.8, 0.1
"""A climb slows down if its later half brings less than the first ratio times what its earlier half
brought. It has settled if the later half brings at most the second ratio times as much."""
MIN_CLIMB_DURATION_S = 60.0
"""Minimum duration of a climb before it is judged, for slow machines."""
STEADY_RISE_BUDGET_SHARE = 0.33
"""Share of the budget. A steady rise by this much after the minimum warm-up counts as growth."""
MAX_WARMUP_BUDGET_FACTOR = 8
"""Multiple of the budget. A steady climb of a warm-up beyond it is a fast leak."""
PACE_MARK_SHARES = (0.1, 0.55, 1.0)
"""Shares of that growth between which the pace of a climb is measured."""
MIN_PACE_SAMPLES = 4
"""Minimum number of samples between two of :data:`PACE_MARK_SHARES`."""
LOAD_CLASS_SETTLE_S = 45.0
"""Time that requests need to reach their full size, if they arrive together."""
MAX_LOAD_CLASS_EXCESS_FACTOR = 1.25
"""A load stays in its class below the class's load times this factor, so that it does not
alternate."""
MAX_WAIT_FOR_LOAD_S = 900.0
"""Maximum wait for the warm-up of an engine that reports neither load nor readiness."""


class Warmup:
    """Warm-up of one epoch: from a ready engine to a base of its memory.

    It ends when ``min_s`` has passed and memory has settled, or after twice that time. ``served``
    is False until a request has completed; until then, the base is provisional.
    """

    def __init__(self, min_s: float, budget: int | None, interval_s: float) -> None:
        self.min_s = min_s
        self.budget = budget
        self.floor: Point | None = None
        self.climbing = False
        self.served = True
        self._started_at: float | None = None
        self._first_seen: float | None = None
        self._slice_s = max(interval_s, min_s / 8)
        self._slice: Point | None = None
        self._slice_end = 0.0
        self._climb: list[Point] = []
        self._marks: list[Point] = []
        self._mark_s = MIN_PACE_SAMPLES * interval_s

    def add(self, point: Point, ready: bool | None) -> bool:
        """Add a sample, and return whether the engine is warm; ``ready`` is None if unknown.

        Then :attr:`floor` is the base, and :attr:`climbing` is True if memory never settled.
        """
        self.served = point.requests != 0
        if self._first_seen is None:
            self._first_seen = point.t
        if self._started_at is None:
            waited, longest = point.t - self._first_seen, min(MAX_WAIT_FOR_LOAD_S, 10 * self.min_s)
            if ready is None and point.load is None and waited < longest:
                return False
            self._started_at = point.t
        self._append_point(point)
        if self._exceeds_warmup(point):
            # Its load may belong to no floor, and a base of another load is not comparable.
            self.floor, self.climbing = replace(self._get_first_floor(point), load=point.load), True
            return True
        elapsed = point.t - self._started_at
        if elapsed < self.min_s:
            return False
        latest = self._climb[-MIN_SETTLING_FLOORS:]
        if self.floor is None:
            self.floor = latest[-1] if latest else point
        if self.min_s <= 0 or self._has_settled():
            later = latest[len(latest) // 2 :]
            self.floor = min((*later, point), key=lambda p: p.bytes)
            return True
        late = elapsed >= max(MAX_WARMUP_FACTOR * self.min_s, MIN_CLIMB_DURATION_S)
        if self._is_slowing():
            if late:
                self.floor = latest[-1]
            return late
        rise = measure_unexplained_growth(self.floor, point)
        leaking = self.budget is not None and rise >= STEADY_RISE_BUDGET_SHARE * self.budget
        self.climbing = leaking or late
        return self.climbing

    def measure_growth(self, point: Point) -> int:
        """Return the growth since the first floor of the warm-up, in bytes."""
        return max(0, measure_unexplained_growth(self._get_first_floor(point), point))

    @property
    def has_started(self) -> bool:
        """Whether the warm-up has started."""
        return self._started_at is not None

    def _exceeds_warmup(self, point: Point) -> bool:
        if self.budget is None or len(self._marks) == len(PACE_MARK_SHARES):
            return False
        share = self.measure_growth(point) / (MAX_WARMUP_BUDGET_FACTOR * self.budget)
        passed = sum(share >= mark for mark in PACE_MARK_SHARES)
        self._marks += [point] * (passed - len(self._marks))
        if len(self._marks) < len(PACE_MARK_SHARES):
            return False
        first, half, last = self._marks
        earlier_s, later_s = half.t - first.t, last.t - half.t
        steady = MAX_SLOWING_HALVES_RATIO * later_s <= earlier_s and later_s >= self._mark_s
        return steady and is_load_comparable(last.load, first.load)

    def _get_first_floor(self, point: Point) -> Point:
        return self._climb[0] if self._climb else self._slice or point

    def _append_point(self, point: Point) -> None:
        if self._slice is not None and point.t >= self._slice_end:
            self._climb.append(self._slice)
            self._slice = None
        if self._slice is None:
            self._slice, self._slice_end = point, point.t + self._slice_s
        elif point.bytes < self._slice.bytes:
            self._slice = point

    def _is_slowing(self) -> bool:
        if len(self._climb) < MIN_SETTLING_FLOORS:
            return True
        earlier, later = _measure_rise_of_each_half(self._climb)
        return later < MAX_SLOWING_HALVES_RATIO * earlier

    def _has_settled(self) -> bool:
        if len(self._climb) < MIN_SETTLING_FLOORS:
            return False
        earlier_rise, later_rise = _measure_rise_of_each_half(self._climb)
        if (
            earlier_rise > MAX_SETTLED_RISE_BYTES
            and later_rise <= MAX_SETTLED_HALVES_RATIO * earlier_rise
        ):
            return True
        half, floors = MIN_SETTLING_FLOORS // 2, self._climb[-MIN_SETTLING_FLOORS:]
        return (
            measure_unexplained_growth(_find_lowest(floors[:half]), _find_lowest(floors[half:]))
            <= MAX_SETTLED_RISE_BYTES
        )


def _measure_rise_of_each_half(climb: list[Point]) -> tuple[int, int]:
    width = len(climb) // 4
    middle = (len(climb) - width) // 2
    first, half, last = (
        _find_lowest(climb[begin : begin + width]) for begin in (0, middle, len(climb) - width)
    )
    return measure_unexplained_growth(first, half), measure_unexplained_growth(half, last)


def _find_lowest(points: list[Point]) -> Point:
    return min(points, key=lambda p: p.bytes)


class Baseline:
    """Base of memory for each class of load, and growth above the base, in bytes."""

    def __init__(self, floor: Point) -> None:
        self.growth = 0
        self.explained = 0
        self.measured = False
        self.known = True
        self.base = floor.bytes
        self.since = floor.t
        self._bases = {_find_load_class(floor.load): floor}
        self._entering: tuple[int, float, Point] | None = None

    @property
    def bases(self) -> list[Point]:
        """The base of each load class."""
        return list(self._bases.values())

    @classmethod
    def restore(cls, bases: list[Point]) -> Baseline:
        """Return a baseline with the ``bases`` of an earlier baseline, at least one."""
        baseline = cls(bases[0])
        baseline._bases = {_find_load_class(base.load): base for base in bases}
        # Without a base of the present load, the growth since then is unknown, not 0.
        baseline.known = False
        return baseline

    def update(self, floor: Point) -> None:
        """Measure the growth at ``floor``, the point with the lowest memory of the last seconds."""
        base = self._find_base(floor.load)
        if base is None:
            base = self._enter_class(_find_load_class(floor.load), floor)
        if base is None:
            return
        self._entering = None
        self.measured = self.known = True
        self.base = base.bytes
        self.growth = measure_unexplained_growth(base, floor)
        self.explained = max(0, floor.declared - base.declared)

    def replace_bases(self, growth: int, *floors: Point) -> None:
        """Replace all bases, so that the growth at each of ``floors`` is ``growth`` bytes."""
        self._bases = {
            _find_load_class(floor.load): replace(floor, bytes=floor.bytes - growth)
            for floor in floors
        }
        self._entering = None

    def measure_growth(self, point: Point) -> int:
        """Return the growth at ``point`` in bytes, at least the growth that was measured last."""
        base = self._find_base(point.load)
        growth = 0 if base is None else measure_unexplained_growth(base, point)
        return max(0, self.growth, growth)

    def is_settling(self) -> bool:
        """Whether growth is unknown: the load exceeds that of every class with a baseline."""
        return self._entering is not None and self._entering[0] > max(self._bases)

    def _find_base(self, load: int | None) -> Point | None:
        base = self._bases.get(_find_load_class(load))
        if base is None and load is not None:
            base = self._bases.get(_find_load_class(int(load / MAX_LOAD_CLASS_EXCESS_FACTOR)))
        return base

    def _enter_class(self, class_number: int, floor: Point) -> Point | None:
        """Return the base of a new class of load; None until memory at this load has settled.

        A lighter load needs no more memory than a busier one, so growth above the base of the next
        busier class counts.
        """
        busier = [other for other in self._bases if other > class_number >= 0]
        if busier:
            base = self._bases[min(busier)]
            self.growth = max(self.growth, measure_unexplained_growth(base, floor))
        since, highest = floor.t, floor
        if self._entering is not None:
            # The time counts from the first new class. A load between two would never settle.
            entered, since, before = self._entering
            if entered == class_number and before.bytes > floor.bytes:
                highest = before
        self._entering = (class_number, since, highest)
        if floor.t - since < LOAD_CLASS_SETTLE_S:
            return None
        base = replace(highest, bytes=highest.bytes - max(0, self.growth))
        self._bases[class_number] = base
        return base


def _find_load_class(load: int | None) -> int:
    return -1 if load is None else max(0, load).bit_length()
