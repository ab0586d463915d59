"""Growth of one series of sizes: robust trends, over several horizons at once.

A trend says whether memory rises over time at comparable load, and how fast. It is Theil–Sen's
slope (the median over pairs of points) with Kendall's tau as its confidence, restricted to
*conclusive* pairs. Memory follows load, so a rise is conclusive only where the load did not rise
with it, and a fall only where the load did not fall. Steps are no trend: a burst leaves an
allocator's high-water mark behind, and a cache is filled once; all thirds of a trend must rise.
What a trend may mean is weighed in ``odds.py``.

Each horizon keeps the floors of a few buckets of time: seconds for a leak of 400 MB a minute, hours
and days for one of 90 bytes a request. Memory is bounded whatever the run's length.

A rise counts only beyond the *swing*: the largest fall at comparable load that this horizon or a
longer one has seen lately. Garbage that a collector takes back rises and falls for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from plimsoll_sidecar.detect.thresholds import THRESHOLDS

MIN_POINTS = 8
MIN_SHARE, MAX_SHARE = 0.05, 20.0
"""Bounds of a later half's rise as a share of the earlier half's: beyond them it is a step."""
THIRD_SHARE = 0.2
"""The middle and the last third of a trend each bring at least this share of its rise."""
MIN_DIFFER = 0.5
"""A load says how it climbed if it differs in this share of all pairs; otherwise it hardly did."""
_LOAD_SLACK = 1.1


@dataclass(frozen=True, slots=True)
class Point:
    """A floor of memory. ``declared`` is what the engine's ledger accounted for at that moment.

    Bytes and seconds; ``load`` counts requests in flight and ``requests`` those of the epoch; each
    is None where unknown.
    """

    t: float
    bytes: int
    declared: int = 0
    load: int | None = None
    requests: int | None = None


@dataclass(frozen=True, slots=True)
class Trend:
    """A rise in bytes over ``span_s`` that is neither a step nor noise.

    ``noise`` is the median deviation from its line in bytes, ``fading`` the logarithm of the later
    half's rise as a share of the earlier half's, and ``climb`` says how the load climbed with it
    (from -1 to 1, as Kendall's tau).
    """

    bytes_per_s: float
    rise: float
    span_s: float
    noise: float
    bytes_per_request: float | None
    fading: float
    climb: float


def not_busier(later: int | None, earlier: int | None) -> bool:
    """Whether load did not rise, with a slack of a tenth and one request; unknown is equal."""
    if later is None or earlier is None:
        return True
    return later <= earlier * _LOAD_SLACK + 1


def unexplained(earlier: Point, later: Point) -> int:
    """Growth from one point to the next that the ledger does not declare.

    A ledger that shrank explains nothing: its memory may have been kept by the allocator.
    """
    return later.bytes - earlier.bytes - max(0, later.declared - earlier.declared)


def fit(points: Sequence[Point], min_rise: float) -> Trend | None:
    """Return the trend of points in order of time; None if they have none of ``min_rise`` bytes."""
    if len(points) < MIN_POINTS:
        return None
    first, last = points[0], points[-1]
    if max(p.bytes for p in points) - min(p.bytes for p in points) < min_rise:
        return None
    slopes, score, pairs, busier, differ = [], 0, 0, 0, 0.0
    for j, later in enumerate(points):
        for earlier in points[:j]:
            pairs += 1
            if earlier.load is not None and later.load is not None:
                busier += (later.load > earlier.load) - (later.load < earlier.load)
                differ += later.load != earlier.load
            difference = unexplained(earlier, later)
            rises = difference > 0
            if rises and not not_busier(later.load, earlier.load):
                continue
            if difference < 0 and not not_busier(earlier.load, later.load):
                continue
            score += rises - (difference < 0)
            slopes.append(difference / (later.t - earlier.t))
    if len(slopes) < 2 * MIN_POINTS:
        return None
    tau, slope, span = score / len(slopes), median(slopes), last.t - first.t
    rise = slope * span
    if tau < THRESHOLDS.tau or rise < min_rise:
        return None
    levels = [unexplained(first, p) for p in points]
    begin, middle, end = _thirds(levels)
    first_half, second_half = middle - begin, end - middle
    if min(first_half, second_half) < THIRD_SHARE * rise:
        return None
    share = second_half / max(1.0, first_half)
    return Trend(
        bytes_per_s=slope,
        rise=rise,
        span_s=span,
        noise=_deviation(points, levels, slope),
        bytes_per_request=_per_request(first, last, rise),
        fading=math.log(min(MAX_SHARE, max(MIN_SHARE, share))),
        climb=busier / max(differ, MIN_DIFFER * pairs),
    )


def _deviation(points: Sequence[Point], levels: Sequence[int], slope: float) -> float:
    start = points[0].t
    rests = [level - slope * (p.t - start) for p, level in zip(points, levels, strict=True)]
    middle = median(rests)
    return median(abs(rest - middle) for rest in rests)


def _thirds(levels: Sequence[int]) -> tuple[float, float, float]:
    third = max(1, len(levels) // 3)
    return median(levels[:third]), median(levels[third:-third]), median(levels[-third:])


def _per_request(first: Point, last: Point, rise: float) -> float | None:
    if first.requests is None or last.requests is None or last.requests <= first.requests:
        return None
    return rise / (last.requests - first.requests)


WIDTHS_S = (1.0, 5.0, 30.0, 180.0, 450.0, 900.0, 5400.0, 32400.0)
"""Widths of the buckets. Horizons overlap: eight buckets of one span fewer than two of the next
but one, so that a trend is never lost between two horizons."""
BUCKETS = 20
SWING_FACTOR = 1.5
SWING_DECAY = 0.995
"""Per bucket: the memory of a swing halves within 140 buckets, seven spans of its horizon."""

SILENT_BUCKETS = 3

LATELY_S, LATELY_SAMPLES, MAX_LATELY = 20.0, 4, 64
LATELY_SHARE = 0.3
"""Growth that brings less of its trend's pace has stopped. Chosen, as the time, on production
containers: a restart for memory that is flat by then gains nothing."""


def widths(interval_s: float) -> list[float]:
    """Return the widths of the buckets for samples ``interval_s`` apart, the narrowest first."""
    return sorted({max(width, interval_s) for width in WIDTHS_S})


class Bucket:
    """The bucket of one width that is open. Its floor is its smallest size."""

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self._open: Point | None = None
        self._number: int | None = None

    def add(self, point: Point) -> Point | None:
        """Take a sample in; return the floor of the bucket before, if this one begins another."""
        number = int(point.t // self.width_s)
        done = self._open if self._number is not None and number != self._number else None
        if self._open is None or number != self._number or point.bytes < self._open.bytes:
            self._open = point
        self._number = number
        return done


class Horizon:
    """The floors of the last buckets of one width."""

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self.floors: deque[Point] = deque(maxlen=BUCKETS)
        self.swing = 0.0
        self._bucket = Bucket(width_s)

    @property
    def span_s(self) -> float:
        """The time that all buckets together cover, in seconds."""
        return self.width_s * BUCKETS

    def add(self, point: Point) -> bool:
        """Take a sample in; true when it completed a bucket."""
        floor = self._bucket.add(point)
        if floor is not None:
            self._close(floor)
        return floor is not None

    def trend(self, min_rise: float) -> Trend | None:
        """Return the trend of the buckets that are not older than one and a half spans."""
        if not self.floors:
            return None
        oldest = self.floors[-1].t - 1.5 * self.span_s
        return fit([p for p in self.floors if p.t >= oldest], min_rise)

    def _close(self, floor: Point) -> None:
        fall = max(
            (-unexplained(p, floor) for p in self.floors if not_busier(p.load, floor.load)),
            default=0,
        )
        self.swing = max(self.swing * SWING_DECAY, fall)
        self.floors.append(floor)


class Growth:
    """All horizons of one series. ``min_rise`` is the smallest rise in bytes that matters."""

    def __init__(self, interval_s: float, min_rise: float) -> None:
        self.horizons = [Horizon(width) for width in widths(interval_s)]
        self.min_rise = min_rise
        self._trends: list[Trend | None] = [None] * len(self.horizons)

    def add(self, point: Point) -> None:
        """Take in a sample and judge each horizon of which it fills a bucket."""
        for index in range(len(self.horizons) - 1, -1, -1):
            horizon = self.horizons[index]
            if not horizon.add(point):
                continue
            swing = max(longer.swing for longer in self.horizons[index:])
            self._trends[index] = horizon.trend(max(self.min_rise, SWING_FACTOR * swing))
        self._forget(point)

    def trend(self) -> Trend | None:
        """Return the steepest of the horizons' trends: the one that leaves the least time."""
        return max(
            (trend for trend in self._trends if trend is not None),
            key=lambda trend: trend.bytes_per_s,
            default=None,
        )

    def forget_rises(self) -> None:
        """Begins anew, but for the swings that were seen."""
        for horizon in self.horizons:
            horizon.floors.clear()
        self._trends = [None] * len(self.horizons)

    def _forget(self, point: Point) -> None:
        """Between two floors a trend ends when its series fell by half of the rise, or went silent.

        A fall with the load says nothing.
        """
        for index, (horizon, trend) in enumerate(zip(self.horizons, self._trends, strict=True)):
            if trend is None:
                continue
            newest = horizon.floors[-1]
            fell = newest.bytes - point.bytes > trend.rise / 2
            silent = point.t - newest.t > SILENT_BUCKETS * horizon.width_s
            if silent or (fell and not_busier(newest.load, point.load)):
                self._trends[index] = None


class LatestGrowth:
    """The growth of the last :data:`LATELY_S` seconds: a trend stands for longer than it lasts."""

    def __init__(self, interval_s: float) -> None:
        self._span_s = max(LATELY_S, LATELY_SAMPLES * interval_s)
        self._points: deque[Point] = deque(maxlen=MAX_LATELY)

    def add(self, point: Point) -> None:
        """Take in a sample."""
        self._points.append(point)
        while point.t - self._points[0].t > self._span_s:
            self._points.popleft()

    def forget(self) -> None:
        """Drop all samples: growth under a load that is new proves nothing yet."""
        self._points.clear()

    def keeps(self, trend: Trend) -> bool:
        """Whether the memory still grows, at :data:`LATELY_SHARE` of the trend's pace at least."""
        if len(self._points) < 2:
            return False
        first, last = self._points[0], self._points[-1]
        return unexplained(first, last) >= LATELY_SHARE * trend.bytes_per_s * (last.t - first.t)


class SegmentDelta:
    """From the oldest floor of the widest buckets that are full to the newest of the narrowest."""

    def __init__(self, interval_s: float) -> None:
        self._widths = widths(interval_s)
        self._buckets: list[Bucket] = []
        self._widest = -1
        self._oldest: deque[Point] = deque(maxlen=BUCKETS)
        self._newest: Point | None = None
        self.forget()

    def add(self, point: Point) -> None:
        """Take in a sample.

        Full buckets give the two points between which the delta is measured.
        """
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
        """What it grew by; 0 before the first bucket is full."""
        return self._newest.bytes - self._oldest[0].bytes if self._newest is not None else 0

    @property
    def declared(self) -> int:
        """What the ledger's caches grew by meanwhile, wherever they lie; never negative."""
        if self._newest is None:
            return 0
        return max(0, self._newest.declared - self._oldest[0].declared)


Key = TypeVar("Key")


def grown_most(deltas: Mapping[Key, SegmentDelta]) -> Key | None:
    """Return the segment that grew most beside declared caches; None where there is no segment.

    A ledger does not say in which segment a cache lies. So each segment is tried as its place, and
    the largest growth that is left is the answer. Of the places, the one counts that leaves the
    least to all other segments: one that grew by less than is declared cannot be it.
    """
    left: dict[Key, int] = {}
    least = math.inf
    for place, delta in deltas.items():
        beside = {key: one.bytes for key, one in deltas.items()}
        beside[place] -= delta.declared
        largest = max(beside, key=lambda key: beside[key])
        rest = sum(abs(size) for key, size in beside.items() if key != largest)
        if rest < least:
            left, least = beside, rest
    return max(left, key=lambda key: left[key], default=None)


WINDOW_SLOTS = 48


class SlidingMinimum:
    """The least growth within a sliding window, in slots of a forty-eighth of it.

    Each slot keeps its mean: the least of many single readings would be noise. The slot that is
    still open does not count, else growth would be measured against itself.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._slot_s = window_s / WINDOW_SLOTS
        self._slots: deque[tuple[float, float, int]] = deque(maxlen=WINDOW_SLOTS + 2)

    def begin(self, t: float) -> None:
        """Take the baseline as the first slot: no growth yet."""
        self._slots.append((t - self._slot_s, 0.0, 1))

    def add(self, t: float, growth: int) -> None:
        """Take in ``growth`` bytes at ``t`` seconds; slots older than the window fall out."""
        since, mean, count = self._slots[-1]
        if t >= since + self._slot_s:
            self._slots.append((t, float(growth), 1))
        else:
            self._slots[-1] = (since, mean + (growth - mean) / (count + 1), count + 1)
        while len(self._slots) > 2 and self._slots[0][0] < t - self._window_s - self._slot_s:
            self._slots.popleft()

    def minimum(self) -> int:
        """Return the smallest mean of the closed slots."""
        means = [mean for _, mean, _ in self._slots]
        return int(min(means[:-1] or means))
