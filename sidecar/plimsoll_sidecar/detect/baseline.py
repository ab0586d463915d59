"""Memory after warm-up, and growth since then at comparable load.

A service under load needs more memory than an idle one, so there is a base for each *class* of load
(0, 1, 2–3, 4–7, … requests). A class that is met for the first time later gets its base from its
first floors, less the growth that was known by then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from plimsoll_sidecar.detect.growth import WIDTHS_S, Bucket, Point, fit, unexplained
from plimsoll_sidecar.detect.thresholds import THRESHOLDS

SETTLED_FLOORS = 8
SETTLED_BYTES = 4 << 20
"""The floor has settled when the later half of the floors is above the earlier by less: pymalloc
and glibc take memory in steps of 1 MiB."""
LATEST_WARMUPS = 2.0
"""A warm-up ends after this multiple of its length at the latest: most real leaks begin with the
first request, and one that waited for memory to settle would never be seen."""
SLOWING_SHARE, FLAT_SHARE = 0.8, 0.1
"""A climb slows when its later half rose by less than this share of what the earlier half rose by,
and has settled when that is hardly anything."""
MIN_WATCHED_S = 60.0
"""A climb is judged over this time at least: a slow machine takes longer than it was set for."""
LEAK_SHARE = 0.33
"""A steady rise of this share of the budget after the minimal warm-up is no warm-up any more."""
MAX_WARMUP_BUDGETS = 8
"""A warm-up takes what the engine declares and, beyond that, this multiple of the budget: what may
leak in eight windows. A steady climb that took more is a leak that is faster than the warm-up."""
EARLY_FLOORS = 128
"""Floors in which a climb is looked for, over twice the least time."""
LEAD_SHARE = 0.1
"""A climb begins at the last floor that is above the first by less than this share of the rise: the
engine may have been idle until then."""
CLASS_SETTLE_S = 45.0
"""Requests that came together need this long to reach their full size."""
CLASS_SLACK = 1.25
"""A load above a class by less than this still belongs to it, so that 7 and 8 do not alternate."""
WAIT_FOR_LOAD_S = 900.0
"""Warm-up starts when the engine first reports its load, at the latest after this time. An engine
that says that it is not ready is waited for however long that takes."""


class Warmup:
    """The warm-up of one epoch: from an engine that is ready to a base of its memory.

    It ends by evidence: the least time has passed and the floor has settled; at the latest after
    twice that time. What climbed steadily until then is growth. It ends at any time when what it
    has taken is more than a warm-up takes and still climbs steadily: then all of that is growth.
    ``served`` says whether a request was taken in by its end: the baseline of an engine that served
    none yet is provisional.
    """

    def __init__(self, least_s: float, budget: int | None, interval_s: float) -> None:
        self.least_s = least_s
        self.budget = budget
        self.floor: Point | None = None
        self.climbing = False
        self.served = True
        self._began: float | None = None
        self._first_seen: float | None = None
        self._slice_s = max(interval_s, least_s / 8)
        self._slice: Point | None = None
        self._slice_end = 0.0
        self._floors: deque[Point] = deque(maxlen=SETTLED_FLOORS)
        self._climb: list[Point] = []
        self._early: deque[Point] = deque(maxlen=EARLY_FLOORS)
        width_s = max(WIDTHS_S[0], interval_s, LATEST_WARMUPS * least_s / EARLY_FLOORS)
        self._early_bucket = Bucket(width_s)

    def add(self, point: Point, ready: bool | None) -> bool:
        """Return True once warm: ``floor`` is the base, ``climbing`` says that it never settled.

        ``ready`` is what the engine says of itself, None where it says nothing.
        """
        if ready is False:
            self._restart()
            return False
        self.served = point.requests != 0
        if self._first_seen is None:
            self._first_seen = point.t
        if self._began is None:
            waited = point.t - self._first_seen
            if (
                ready is None
                and point.load is None
                and waited < min(WAIT_FOR_LOAD_S, 10 * self.least_s)
            ):
                return False
            self._began = point.t
        self._take(point)
        if self._outruns(point):
            # Its load may be of none of the floors, and a base of another load cannot be compared.
            self.floor, self.climbing = replace(self._first(point), load=point.load), True
            return True
        elapsed = point.t - self._began
        if elapsed < self.least_s:
            return False
        if self.floor is None:
            self.floor = self._floors[-1] if self._floors else point
        if self.least_s <= 0 or self._settled():
            later = list(self._floors)[len(self._floors) // 2 :]
            self.floor = min((*later, point), key=lambda p: p.bytes)
            return True
        late = elapsed >= max(LATEST_WARMUPS * self.least_s, MIN_WATCHED_S)
        if self._slows():
            if late:
                self.floor = self._floors[-1]
            return late
        rise = unexplained(self.floor, point)
        leaking = self.budget is not None and rise >= LEAK_SHARE * self.budget
        self.climbing = leaking or late
        return self.climbing

    def grown(self, point: Point) -> int:
        """Return what is above the first floor since the warm-up began."""
        return max(0, unexplained(self._first(point), point))

    def settled_load(self, point: Point) -> Point | None:
        """Return the highest floor of the warm-up's end, under the load that settled.

        That is the highest class of load of which there was some in both halves of it. None where
        that was too short for a load to settle, or the load of the base came again: the base is the
        lowest floor of all, which may be of the first moment, with a load that was never so low
        again.
        """
        recent = [p for p in self._climb if point.t - p.t <= CLASS_SETTLE_S]
        if len(recent) < 2 or len(recent) == len(self._climb):
            return None
        if self.floor is None or _class(self.floor.load) in {_class(p.load) for p in recent}:
            return None
        half = len(recent) // 2
        number = min(max(_class(p.load) for p in part) for part in (recent[:half], recent[half:]))
        under = [p for p in recent if _class(p.load) == number]
        if not under:
            return None
        size = max(p.bytes for p in recent if _class(p.load) <= number)
        return replace(under[-1], bytes=size)

    @property
    def began(self) -> bool:
        """Whether the engine is ready, so that what its memory does counts."""
        return self._began is not None

    def _outruns(self, point: Point) -> bool:
        """Return whether a steady climb has taken more than a warm-up may take."""
        if self.budget is None or self.grown(point) < MAX_WARMUP_BUDGETS * self.budget:
            return False
        floors = list(self._early)
        if not floors:
            return False
        lead = LEAD_SHARE * unexplained(floors[0], point)
        level = (n for n, floor in enumerate(floors) if unexplained(floors[0], floor) <= lead)
        climb = floors[max(level, default=0) :]
        trend = fit(climb, MAX_WARMUP_BUDGETS / 2 * self.budget)
        earlier, later = _halves(climb)
        return (
            trend is not None
            and trend.climb < THRESHOLDS.busier
            and later >= SLOWING_SHARE * earlier
        )

    def _first(self, point: Point) -> Point:
        """Return the first floor since the warm-up began, ``point`` before there is any."""
        return self._climb[0] if self._climb else self._slice or point

    def _restart(self) -> None:
        """Nothing that was seen so far counts."""
        self.floor = self._began = self._first_seen = self._slice = None
        self._floors.clear()
        self._climb.clear()
        self._early.clear()

    def _take(self, point: Point) -> None:
        if (floor := self._early_bucket.add(point)) is not None:
            self._early.append(floor)
        if self._slice is not None and point.t >= self._slice_end:
            self._floors.append(self._slice)
            self._climb.append(self._slice)
            self._slice = None
        if self._slice is None:
            self._slice, self._slice_end = point, point.t + self._slice_s
        elif point.bytes < self._slice.bytes:
            self._slice = point

    def _slows(self) -> bool:
        """Return whether the climb slows down: a warm-up rises ever slower, a leak does not."""
        earlier, later = _halves(self._climb)
        return len(self._climb) < SETTLED_FLOORS or later < SLOWING_SHARE * earlier

    def _settled(self) -> bool:
        if len(self._floors) < SETTLED_FLOORS:
            return False
        earlier_rise, later_rise = _halves(self._climb)
        if earlier_rise > SETTLED_BYTES and later_rise <= FLAT_SHARE * earlier_rise:
            return True
        half, floors = SETTLED_FLOORS // 2, list(self._floors)
        earlier = min(floors[:half], key=lambda p: p.bytes)
        later = min(floors[half:], key=lambda p: p.bytes)
        return unexplained(earlier, later) <= SETTLED_BYTES


def _halves(climb: list[Point]) -> tuple[int, int]:
    """Return what the earlier and the later half of a climb rose by."""
    if not climb:
        return 0, 0
    third = max(1, len(climb) // 4)
    middle = (len(climb) - third) // 2
    first, half, last = (
        min(climb[begin : begin + third], key=lambda p: p.bytes)
        for begin in (0, middle, len(climb) - third)
    )
    return unexplained(first, half), unexplained(half, last)


class Baseline:
    """The base of each class of load, and the growth above it.

    ``settled`` is that of the load at the end of the warm-up, where it is not that of ``floor``.
    """

    def __init__(self, floor: Point, settled: Point | None = None) -> None:
        self.growth = 0
        self.explained = 0
        self.measured = False
        self.base = floor.bytes
        self.since = floor.t
        self._bases = {_class(floor.load): floor}
        if settled is not None:
            self._bases.setdefault(_class(settled.load), settled)
        self._entering: tuple[int, float, Point] | None = None

    @property
    def bases(self) -> list[Point]:
        """The base of each class of load."""
        return list(self._bases.values())

    @classmethod
    def of(cls, bases: list[Point]) -> Baseline:
        """Return a baseline with ``bases`` (at least one), as :attr:`bases` gave them."""
        baseline = cls(bases[0])
        baseline._bases = {_class(base.load): base for base in bases}
        return baseline

    def update(self, floor: Point) -> None:
        """Take in the floor of the last seconds."""
        base = self._base(floor.load)
        if base is None:
            busier = self._busier(floor.load)
            if busier is not None:
                self.growth = max(self.growth, unexplained(busier, floor))
            base = self._enter(_class(floor.load), floor)
            if base is None:
                return
        self._entering = None
        self.measured = True
        self.base = base.bytes
        self.growth = unexplained(base, floor)
        self.explained = max(0, floor.declared - base.declared)

    def learn_again(self, known: int, *floors: Point) -> None:
        """Measure from these floors on, each for its load, of which ``known`` bytes are growth."""
        self._bases = {_class(one.load): replace(one, bytes=one.bytes - known) for one in floors}
        self._entering = None

    def grown(self, point: Point) -> int:
        """Return the growth at ``point``, which need not be a floor.

        The last known at a load that has no base yet.
        """
        base = self._base(point.load)
        return max(0, self.growth, unexplained(base, point) if base is not None else 0)

    def settling(self) -> bool:
        """Whether load has just risen higher than ever before: nothing can be compared yet."""
        return self._entering is not None and self._entering[0] > max(self._bases)

    def _base(self, load: int | None) -> Point | None:
        """Return the base of the load's class.

        The one of the class just below where the load hardly differs.
        """
        base = self._bases.get(_class(load))
        if base is None and load is not None:
            base = self._bases.get(_class(int(load / CLASS_SLACK)))
        return base

    def _busier(self, load: int | None) -> Point | None:
        """Return the base of the next busier class: a lighter load needs no more than that."""
        number = _class(load)
        busier = [one for one in self._bases if one > number >= 0]
        return self._bases[min(busier)] if busier else None

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


class NewDemand:
    """What memory did while more was asked of the engine than ever before.

    ``pace`` is that of the growth before, in bytes a second, which goes on. All else is explained:
    the high water of the new demand, because what an allocator keeps of it is not proportional.
    """

    def __init__(self, floor: Point, pace: float) -> None:
        self._first = self._highest = floor
        self._pace = pace

    def add(self, floor: Point) -> None:
        """Take in the floor of the last seconds."""
        highest = self._highest
        busiest = max((highest, floor), key=lambda p: -1 if p.load is None else p.load)
        larger = floor if floor.bytes > highest.bytes else highest
        self._highest = replace(larger, load=busiest.load)

    def end(self, baseline: Baseline, floor: Point) -> int:
        """Return what the demand explains; from what it has reached, growth is measured then."""
        rose = max(0, unexplained(self._first, floor))
        went_on = min(rose, int(self._pace * (floor.t - self._first.t)))
        if max(rose, unexplained(self._first, self._highest)) - went_on <= SETTLED_BYTES:
            return 0
        baseline.learn_again(max(0, baseline.growth) + went_on, self._highest, floor)
        return rose - went_on


def _class(load: int | None) -> int:
    return -1 if load is None else max(0, load).bit_length()
