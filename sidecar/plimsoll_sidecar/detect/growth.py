"""Find trends in a series of memory sizes over several horizons at once.

A trend states whether memory rises over time at comparable load, and how fast. It is Theil–Sen's
slope with Kendall's tau as its confidence, restricted to *conclusive* pairs of points. Memory
follows load: a rise is conclusive only if the load did not rise with it, and a fall only if the
load did not fall. A step is no trend: all thirds of a trend must rise. ``odds.py`` weighs whether a
trend is a leak.

Each horizon keeps the lowest size (floor) of a few time buckets. A leak of 400 MB a minute needs
buckets of seconds, and one of 90 bytes a request needs buckets of hours. The detector's own memory
stays bounded, however long the run is.

A rise counts only beyond the *swing*: the largest recent fall at comparable load, in this horizon
or a longer one. Garbage collection causes such rises and falls all the time.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from plimsoll_api.assessment import Segment
from plimsoll_sidecar.detect.thresholds import THRESHOLDS

MIN_POINTS = 8
MIN_SHARE, MAX_SHARE = 0.05, 20.0
"""Bounds of the rise of the later half, divided by that of the earlier half. Beyond them, the rise
is a step."""
THIRD_SHARE = 0.2
"""Minimum share of the rise that the middle and the last third of a trend each contribute."""
MIN_DIFFERING_SHARE = 0.5
"""Share of all pairs in which the load must differ before its own trend counts fully."""
LOAD_SLACK = 1.1
WIDTHS_S = (1.0, 5.0, 30.0, 180.0, 450.0, 900.0, 5400.0, 32400.0)
"""Bucket widths. Horizons overlap, so that no trend is lost between two of them: eight buckets span
less than two buckets of the next width but one."""
BUCKETS_PER_HORIZON = 20
SWING_FACTOR = 1.5
SWING_DECAY = 0.995
"""Decay of a swing per bucket: it halves within 140 buckets, seven spans of its horizon."""
MAX_SPANS = 1.5
"""Floors older than this multiple of a horizon's span do not count."""
SILENT_BUCKETS = 3
LATEST_S, LATEST_SAMPLES, MAX_LATEST = 20.0, 4, 64
LATEST_SHARE = 0.3
"""Growth below this share of its trend's pace has stopped. Both this and the time were chosen on
production containers: restarting for memory that no longer grows gains nothing."""
GROWTH_BEGIN_SHARE, MIN_HALF_SHARE, MAX_STEP_SHARE = 0.1, 0.5, 0.4
"""Growth begins at this share of what it is now. Its later half must bring at least half of what
the earlier one did, and the last seconds half of the mean pace. No step may bring more than the
last share, because the newest step of a table that doubles is half of all."""
FLOOR_S = 5.0
"""Growth is measured at the lowest size of this many seconds, which delays it by as much."""
CONFIRM_S = 120.0
"""A steady leak that spends its budget in ten minutes is to be confirmed within this time."""
MIN_GROWTH_S = (1 - GROWTH_BEGIN_SHARE) * (CONFIRM_S - FLOOR_S)
"""Growth must last for this long before it is confirmed: as long as :data:`CONFIRM_S` allows,
because longer growth excludes more of the caches that fill evenly. Each third of a minute less
confirms two or three more of those in the recordings."""
HASTY_BUDGET_SHARE, MIN_HASTY_S, STEADY_SHARE = 0.8, 30.0, 0.9
"""Growth that would spend this share of its budget within :data:`MIN_GROWTH_S` is judged after
:data:`MIN_HASTY_S`, the time of a restart. Its later half must then bring ``STEADY_SHARE`` of the
earlier one, which excludes caches that fill with a time constant below 140 s."""
URGENT_BUDGETS = 2.0
"""Growth by this multiple of the budget is judged even before :data:`MIN_HASTY_S`."""
UNTHINNED_POINTS, POINTS_PER_E_FOLD = 64, 24
"""Points that are collected before older ones are dropped, and points for each e-fold of age."""
WINDOW_SLOTS = 48


@dataclass(frozen=True, slots=True)
class Point:
    """A memory size at time ``t``, in bytes and seconds.

    ``declared`` is what the engine's ledger accounted for. ``load`` is the number of requests in
    flight, ``requests`` the number completed in this epoch; both are None if unknown.
    """

    t: float
    bytes: int
    declared: int = 0
    load: int | None = None
    requests: int | None = None


@dataclass(frozen=True, slots=True)
class Trend:
    """A rise of ``rise`` bytes within ``span_s`` that is neither a step nor noise.

    ``noise`` is the median absolute deviation from the fitted line, in bytes. ``fading`` is the
    logarithm of the later half's rise as a share of the earlier half's. ``climb`` is Kendall's tau
    of the load over the same time, from -1 to 1.
    """

    bytes_per_s: float
    rise: float
    span_s: float
    noise: float
    bytes_per_request: float | None
    fading: float
    climb: float


def is_load_comparable(later: int | None, earlier: int | None) -> bool:
    """Report whether the load rose by at most a tenth and one request.

    Unknown loads are comparable.
    """
    return later is None or earlier is None or later <= earlier * LOAD_SLACK + 1


def measure_unexplained(earlier: Point, later: Point) -> int:
    """Return the growth between two points that the ledger does not explain, in bytes.

    A ledger that shrank explains nothing, because the allocator may have kept its memory.
    """
    return later.bytes - earlier.bytes - max(0, later.declared - earlier.declared)


def fit_trend(points: Sequence[Point], min_rise: float) -> Trend | None:
    """Return the trend of points in order of time; None if none rises by ``min_rise`` bytes."""
    sizes = [point.bytes for point in points]
    if len(points) < MIN_POINTS or max(sizes) - min(sizes) < min_rise:
        return None
    slopes, score, pairs, busier, differ = [], 0, 0, 0, 0.0
    for j, later in enumerate(points):
        for earlier in points[:j]:
            pairs += 1
            if earlier.load is not None and later.load is not None:
                busier += (later.load > earlier.load) - (later.load < earlier.load)
                differ += later.load != earlier.load
            difference = measure_unexplained(earlier, later)
            if difference > 0 and not is_load_comparable(later.load, earlier.load):
                continue
            if difference < 0 and not is_load_comparable(earlier.load, later.load):
                continue
            score += (difference > 0) - (difference < 0)
            slopes.append(difference / (later.t - earlier.t))
    if len(slopes) < 2 * MIN_POINTS:
        return None
    first, last = points[0], points[-1]
    tau, slope, span = score / len(slopes), median(slopes), last.t - first.t
    rise = slope * span
    if tau < THRESHOLDS.tau or rise < min_rise:
        return None
    levels = [measure_unexplained(first, p) for p in points]
    third = len(levels) // 3
    begin, middle, end = (
        median(part) for part in (levels[:third], levels[third:-third], levels[-third:])
    )
    first_half, second_half = middle - begin, end - middle
    if min(first_half, second_half) < THIRD_SHARE * rise:
        return None
    share = second_half / max(1.0, first_half)
    served = (last.requests or 0) - (first.requests or 0) if first.requests is not None else 0
    return Trend(
        bytes_per_s=slope,
        rise=rise,
        span_s=span,
        noise=_median_deviation(
            [level - slope * (p.t - first.t) for p, level in zip(points, levels, strict=True)]
        ),
        bytes_per_request=rise / served if served > 0 else None,
        fading=math.log(min(MAX_SHARE, max(MIN_SHARE, share))),
        climb=busier / max(differ, MIN_DIFFERING_SHARE * pairs),
    )


def _median_deviation(residuals: Sequence[float]) -> float:
    middle = median(residuals)
    return median(abs(residual - middle) for residual in residuals)


class Bucket:
    """Current time bucket of one width. Its floor is the smallest size in it."""

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self._floor: Point | None = None
        self._number: int | None = None

    def add(self, point: Point) -> Point | None:
        """Add a sample. Return the floor of the previous bucket if the sample starts a new one."""
        number = int(point.t // self.width_s)
        is_new = number != self._number
        done = self._floor if is_new else None
        if self._floor is None or is_new or point.bytes < self._floor.bytes:
            self._floor = point
        self._number = number
        return done


def create_buckets(interval_s: float) -> list[Bucket]:
    """Return a bucket of each width for samples ``interval_s`` apart, the narrowest first."""
    return [Bucket(width) for width in sorted({max(width, interval_s) for width in WIDTHS_S})]


class Horizon:
    """The floors of the last :data:`BUCKETS_PER_HORIZON` buckets of one width, and their trend."""

    def __init__(self, bucket: Bucket) -> None:
        self.width_s = bucket.width_s
        self.bucket = bucket
        self.floors: deque[Point] = deque(maxlen=BUCKETS_PER_HORIZON)
        self.swing = 0.0
        self.trend: Trend | None = None

    def append(self, floor: Point) -> None:
        """Append the floor of a complete bucket, and update the swing."""
        falls = (
            -measure_unexplained(p, floor)
            for p in self.floors
            if is_load_comparable(p.load, floor.load)
        )
        self.swing = max(self.swing * SWING_DECAY, max(falls, default=0))
        self.floors.append(floor)

    def fit(self, min_rise: float) -> None:
        """Compute the trend of the floors that are not too old."""
        oldest = self.floors[-1].t - MAX_SPANS * self.width_s * BUCKETS_PER_HORIZON
        self.trend = fit_trend([p for p in self.floors if p.t >= oldest], min_rise)

    def expire(self, point: Point) -> None:
        """Drop the trend if half of its rise has come back, or if samples have stopped.

        A fall of memory that comes with a fall of load does not count.
        """
        if self.trend is None:
            return
        newest = self.floors[-1]
        fell = newest.bytes - point.bytes > self.trend.rise / 2
        silent = point.t - newest.t > SILENT_BUCKETS * self.width_s
        if silent or (fell and is_load_comparable(newest.load, point.load)):
            self.trend = None


class Trends:
    """All horizons of one series. ``min_rise`` is the smallest rise in bytes that matters."""

    def __init__(self, interval_s: float, min_rise: float) -> None:
        self.horizons = [Horizon(bucket) for bucket in create_buckets(interval_s)]
        self.min_rise = min_rise

    def add(self, point: Point) -> None:
        """Add a sample. Fit each horizon in which it completes a bucket."""
        swing = 0.0
        for horizon in reversed(self.horizons):
            floor = horizon.bucket.add(point)
            if floor is not None:
                horizon.append(floor)
            swing = max(swing, horizon.swing)
            if floor is not None:
                horizon.fit(max(self.min_rise, SWING_FACTOR * swing))
        for horizon in self.horizons:
            horizon.expire(point)

    def find_steepest(self) -> Trend | None:
        """Return the steepest trend of all horizons; None if no horizon has a trend."""
        trends = [horizon.trend for horizon in self.horizons if horizon.trend is not None]
        return max(trends, key=lambda trend: trend.bytes_per_s, default=None)

    def clear(self) -> None:
        """Drop all floors and trends, but keep the swings."""
        for horizon in self.horizons:
            horizon.floors.clear()
            horizon.trend = None


class LatestGrowth:
    """Growth of the last :data:`LATEST_S` seconds.

    It shows whether memory still grows: a trend outlasts the growth that it was fitted to.
    """

    def __init__(self, interval_s: float) -> None:
        self._span_s = max(LATEST_S, LATEST_SAMPLES * interval_s)
        self._points: deque[Point] = deque(maxlen=MAX_LATEST)

    def add(self, point: Point) -> None:
        """Add a sample, and drop those that are too old."""
        self._points.append(point)
        while point.t - self._points[0].t > self._span_s:
            self._points.popleft()

    def clear(self) -> None:
        """Drop all samples, because growth under a new load proves nothing yet."""
        self._points.clear()

    def is_continuing(self, trend: Trend) -> bool:
        """Report whether memory grows at least at :data:`LATEST_SHARE` of the trend's pace."""
        if len(self._points) < 2:
            return False
        first, last = self._points[0], self._points[-1]
        return measure_unexplained(first, last) >= LATEST_SHARE * trend.bytes_per_s * (
            last.t - first.t
        )


class GrowthHistory:
    """Growth since the warm-up, to distinguish sustained growth from growth that ends.

    It keeps points ``(t, growth, requests)`` whose distance is at most a share of their age. One
    array holds them, because many small allocations would fragment the heap over time.
    """

    def __init__(self, interval_s: float) -> None:
        self._now_s = max(LATEST_S, LATEST_SAMPLES * interval_s)
        self._rows = array("d")
        self._limit = UNTHINNED_POINTS

    def __len__(self) -> int:
        return len(self._rows) // 3

    def add(self, t: float, growth: int, requests: int | None) -> None:
        """Add ``growth`` bytes at ``t`` seconds, with the requests completed until then."""
        self._rows.extend((t, growth, math.nan if requests is None else requests))
        if len(self) >= self._limit:
            self._thin(t)
            self._limit = len(self) + UNTHINNED_POINTS

    def rebase(self, growth: int) -> None:
        """Subtract ``growth`` bytes from all points, after the base was raised by that amount."""
        for number in range(1, len(self._rows), 3):
            self._rows[number] -= growth

    def is_sustained(self, budget: int) -> bool:
        """Report whether the growth has lasted, continues, and neither fades nor is a step.

        Growth begins where it last was a tenth of what it is now. Caches that fill, tables that
        double and nightly jobs resemble a leak until they end. Growth that fades is sustained only
        if it would still exceed the ``budget``, in bytes, when each further half brings less by the
        same ratio. Growth that would spend most of the budget before it has lasted long enough is
        judged earlier, but must not have slowed down.
        """
        points = self._list_points_since(GROWTH_BEGIN_SHARE)
        (begin, low, served), (now, high, served_now) = points[0], points[-1]
        lasted_s, rise = now - begin, high - low
        hasty = lasted_s < MIN_GROWTH_S
        too_slow = rise * MIN_GROWTH_S < HASTY_BUDGET_SHARE * budget * lasted_s
        too_young = lasted_s < MIN_HASTY_S and rise < URGENT_BUDGETS * budget
        if rise <= 0 or too_young or (hasty and too_slow):
            return False
        latest = next((p for p in reversed(points) if now - p[0] >= self._now_s), points[0])
        if (high - latest[1]) * lasted_s < MIN_HALF_SHARE * rise * (now - latest[0]):
            return False
        steps = (later[1] - earlier[1] for earlier, later in pairwise(points))
        if max(steps) > MAX_STEP_SHARE * rise:
            return False
        middles = [[p[1] for p in points if p[0] <= (begin + now) / 2][-1]]
        if served_now - served >= MIN_POINTS:
            middles.append([p[1] for p in points if not p[2] > (served + served_now) / 2][-1])
        halves = [(middle - low, high - middle) for middle in middles]
        if hasty:
            return any(later >= STEADY_SHARE * earlier for earlier, later in halves)
        return any(
            later >= earlier
            or (
                later >= MIN_HALF_SHARE * earlier
                and high + _sum_remaining_terms(earlier, later) >= budget
            )
            for earlier, later in halves
        )

    def _list_points_since(self, share: float) -> list[tuple[float, float, float]]:
        rows, points = self._rows, []
        for number in range(len(rows) - 3, -1, -3):
            points.append((rows[number], rows[number + 1], rows[number + 2]))
            if points[-1][1] <= share * points[0][1]:
                break
        return points[::-1]

    def _thin(self, now: float) -> None:
        """Drop points that are too close to the previous one for their age."""
        kept = self._rows[:3]
        for number in range(3, len(self._rows), 3):
            t = self._rows[number]
            if t - kept[-3] > (now - t) / POINTS_PER_E_FOLD:
                kept.extend(self._rows[number : number + 3])
        self._rows = kept


def _sum_remaining_terms(earlier: float, later: float) -> float:
    """Return the sum of the terms that follow these two in a geometric series."""
    return later * later / (earlier - later)


class SegmentGrowth:
    """The growth of each segment since the first sample, or since :meth:`clear`."""

    def __init__(self) -> None:
        self._bases: dict[Segment, int] = {}
        self._newest: dict[Segment, int] = {}
        self._declared: tuple[int, int] | None = None

    def clear(self) -> None:
        """Discard all samples, so that growth is measured from the next sample on."""
        self._bases, self._newest, self._declared = {}, {}, None

    def add(self, sizes: Mapping[Segment, int], declared: int) -> None:
        """Add the sizes of a sample, and the bytes of all declared caches."""
        self._bases = {**sizes, **self._bases}
        self._newest |= sizes
        self._declared = (self._declared[0] if self._declared else declared, declared)

    def find_largest(self) -> Segment | None:
        """Return the segment that grew most beyond declared caches, or None without segments.

        A ledger does not state in which segment a cache lies. Try each segment as its place, and
        keep the place that leaves the smallest growth in all segments but the largest.
        """
        if self._declared is None:
            return None
        declared = max(0, self._declared[1] - self._declared[0])
        grown = {segment: size - self._bases[segment] for segment, size in self._newest.items()}
        best: Segment | None = None
        least = math.inf
        for place in grown:
            rest = grown | {place: grown[place] - declared}
            largest = max(rest, key=lambda segment: rest[segment])
            others = sum(abs(size) for segment, size in rest.items() if segment is not largest)
            if others < least:
                best, least = largest, others
        return best


class SlidingMinimum:
    """Smallest growth within a sliding window, in :data:`WINDOW_SLOTS` slots.

    Each slot keeps its mean, because the minimum of single readings is noise. The current slot does
    not count, so that growth is not compared with itself.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._slot_s = window_s / WINDOW_SLOTS
        self._slots: deque[tuple[float, float, int]] = deque(maxlen=WINDOW_SLOTS + 2)

    def start(self, t: float) -> None:
        """Add the baseline as the first slot, without growth."""
        self._slots.append((t - self._slot_s, 0.0, 1))

    def add(self, t: float, growth: int) -> None:
        """Add ``growth`` bytes at ``t`` seconds, and drop slots older than the window."""
        since, mean, count = self._slots[-1]
        if t >= since + self._slot_s:
            self._slots.append((t, float(growth), 1))
        else:
            self._slots[-1] = (since, mean + (growth - mean) / (count + 1), count + 1)
        while len(self._slots) > 2 and self._slots[0][0] < t - self._window_s - self._slot_s:
            self._slots.popleft()

    def find_minimum(self) -> int:
        """Return the smallest mean of the complete slots, in bytes."""
        means = [mean for _, mean, _ in self._slots]
        return int(min(means[:-1] or means))
