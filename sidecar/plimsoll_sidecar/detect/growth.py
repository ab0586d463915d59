"""Find trends in memory sizes, over several horizons at once.

A trend is Theil-Sen's slope with Kendall's tau over conclusive pairs of points: memory follows the
load, so a rise counts only if the load did not rise.
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

MIN_TREND_POINTS = 8
MIN_HALVES_RATIO = 0.05
"""Minimum ratio of the halves of a rise, in :attr:`Trend.fading`."""
MIN_RISE_SHARE_PER_THIRD = 0.2
"""Minimum share of the rise in the middle third, and in the last third, of a trend."""
MIN_DIFFERING_PAIRS_SHARE = 0.5
"""Share of pairs with different loads from which the trend of the load has its full weight."""
MAX_COMPARABLE_LOAD_FACTOR = 1.1
"""Maximum factor between two comparable loads. One more request is always comparable."""
BUCKET_WIDTHS_S = (1.0, 5.0, 30.0, 180.0, 450.0, 900.0, 5400.0, 32400.0)
"""Widths of the buckets of all horizons, which overlap so that each trend fits into one."""
BUCKETS_PER_HORIZON = 20
SWING_FACTOR = 1.5
"""A rise counts only beyond this multiple of the swing: the largest recent fall at comparable load,
in this horizon or a longer one."""
SWING_DECAY_PER_BUCKET = 0.995
"""Factor by which a remembered swing shrinks per bucket: it halves in 138 buckets, which is seven
spans of a horizon of 20 buckets."""
MAX_FLOOR_AGE_SPANS = 1.5
"""Maximum age of a floor that counts, as a multiple of the span of its horizon."""
MAX_EMPTY_BUCKETS = 3
"""Number of buckets without a sample after which a trend expires."""
LATEST_GROWTH_WINDOW_S, MIN_LATEST_SAMPLES = 20.0, 4
MIN_LATEST_TO_TREND_PACE = 0.3
"""Share of its trend's pace below which the latest growth counts as ended, chosen on production
containers: restarting for memory that no longer grows gains nothing."""
GROWTH_BEGIN_SHARE, MIN_LATER_HALF_SHARE, MAX_STEP_SHARE = 0.1, 0.5, 0.4
"""Growth begins at the first share of its present size, and its later half brings at least the
second share of what the earlier half brought. No step brings more than the third: the last step of
a table that doubles brings half."""
FLOOR_WINDOW_S = 5.0
"""Window whose lowest size is the floor, at which growth is measured."""
MAX_CONFIRMATION_S = 120.0
"""Time within which a steady leak that exhausts its budget in ten minutes is confirmed."""
MIN_GROWTH_DURATION_S = (1 - GROWTH_BEGIN_SHARE) * (MAX_CONFIRMATION_S - FLOOR_WINDOW_S)
"""Minimum duration of growth before it is confirmed, as long as :data:`MAX_CONFIRMATION_S` allows.
It excludes caches that fill evenly."""
FAST_BUDGET_SHARE, MIN_FAST_DURATION_S, MIN_FAST_HALF_SHARE = 0.8, 30.0, 0.9
"""Growth is fast if it would take the first share of its budget within
:data:`MIN_GROWTH_DURATION_S`. It is judged after the second time, and its later half must bring the
last share of the earlier one, which excludes time constants below 140 s."""
URGENT_BUDGET_FACTOR = 2.0
"""Multiple of the budget from which growth is judged even before :data:`MIN_FAST_DURATION_S`."""
MAX_UNTHINNED_POINTS, POINTS_PER_E_FOLD = 64, 24
"""Points up to which none is dropped, and points kept for ages that differ by a factor of e."""
SLOTS_PER_WINDOW = 48


@dataclass(frozen=True, slots=True)
class Point:
    """A memory size in bytes at time ``t`` in seconds.

    ``declared`` bytes are in the engine's ledger. ``load`` is the number of requests in flight, and
    ``requests`` that of completed ones in this epoch; None if unknown.
    """

    t: float
    bytes: int
    declared: int = 0
    load: int | None = None
    requests: int | None = None


@dataclass(frozen=True, slots=True)
class Trend:
    """A rise of ``rise`` bytes within ``span_s`` that is neither a step nor noise.

    ``noise`` is the median absolute deviation in bytes, ``fading`` log(later half / earlier half),
    at most 0, and ``climb`` Kendall's tau between time and load.
    """

    bytes_per_s: float
    rise: float
    span_s: float
    noise: float
    bytes_per_request: float | None
    fading: float
    climb: float


def is_load_comparable(later: int | None, earlier: int | None) -> bool:
    """Report whether the load rose by at most a tenth plus one request, or is unknown."""
    return later is None or earlier is None or later <= earlier * MAX_COMPARABLE_LOAD_FACTOR + 1


def measure_unexplained_growth(earlier: Point, later: Point) -> int:
    """Return the growth in bytes that the ledger does not explain.

    A decrease of declared memory explains nothing, because the allocator may have kept the memory.
    """
    return later.bytes - earlier.bytes - max(0, later.declared - earlier.declared)


def fit_trend(points: Sequence[Point], min_rise: float) -> Trend | None:
    """Return the trend of ``points``, in order of time, of ``min_rise`` bytes at least; or None."""
    sizes = [point.bytes for point in points]
    if len(points) < MIN_TREND_POINTS or max(sizes) - min(sizes) < min_rise:
        return None
    slopes, score, pairs, busier, differ = [], 0, 0, 0, 0.0
    for j, later in enumerate(points):
        for earlier in points[:j]:
            pairs += 1
            if earlier.load is not None and later.load is not None:
                busier += (later.load > earlier.load) - (later.load < earlier.load)
                differ += later.load != earlier.load
            difference = measure_unexplained_growth(earlier, later)
            if difference > 0 and not is_load_comparable(later.load, earlier.load):
                continue
            if difference < 0 and not is_load_comparable(earlier.load, later.load):
                continue
            score += (difference > 0) - (difference < 0)
            slopes.append(difference / (later.t - earlier.t))
    if len(slopes) < 2 * MIN_TREND_POINTS:
        return None
    first, last = points[0], points[-1]
    tau, slope, span = score / len(slopes), median(slopes), last.t - first.t
    rise = slope * span
    if tau < THRESHOLDS.tau or rise < min_rise:
        return None
    levels = [measure_unexplained_growth(first, p) for p in points]
    third = len(levels) // 3
    begin, middle, end = (
        median(part) for part in (levels[:third], levels[third:-third], levels[-third:])
    )
    first_half, second_half = middle - begin, end - middle
    if min(first_half, second_half) < MIN_RISE_SHARE_PER_THIRD * rise:
        return None
    share = second_half / max(1.0, first_half)
    residuals = [level - slope * (p.t - first.t) for p, level in zip(points, levels, strict=True)]
    middle_residual = median(residuals)
    served = (last.requests or 0) - (first.requests or 0) if first.requests is not None else 0
    return Trend(
        bytes_per_s=slope,
        rise=rise,
        span_s=span,
        noise=median(abs(residual - middle_residual) for residual in residuals),
        bytes_per_request=rise / served if served > 0 else None,
        fading=math.log(min(1.0, max(MIN_HALVES_RATIO, share))),
        climb=busier / max(differ, MIN_DIFFERING_PAIRS_SHARE * pairs),
    )


class Horizon:
    """Floors of the last :data:`BUCKETS_PER_HORIZON` buckets of one width, and their trend."""

    def __init__(self, width_s: float) -> None:
        self.floors: deque[Point] = deque(maxlen=BUCKETS_PER_HORIZON)
        self.swing = 0.0
        self.trend: Trend | None = None
        self._width_s = width_s
        self._bucket: int | None = None
        self._floor: Point | None = None

    def add(self, point: Point) -> bool:
        """Add a sample, and return whether it completed a bucket, which adds a floor."""
        bucket = int(point.t // self._width_s)
        completed = self._floor is not None and bucket != self._bucket
        if self._floor is not None and completed:
            falls = (
                -measure_unexplained_growth(p, self._floor)
                for p in self.floors
                if is_load_comparable(p.load, self._floor.load)
            )
            self.swing = max(self.swing * SWING_DECAY_PER_BUCKET, max(falls, default=0))
            self.floors.append(self._floor)
        if self._floor is None or completed or point.bytes < self._floor.bytes:
            self._floor = point
        self._bucket = bucket
        return completed

    def update_trend(self, min_rise: float) -> None:
        """Fit the trend to the floors that are not too old."""
        oldest = self.floors[-1].t - MAX_FLOOR_AGE_SPANS * self._width_s * BUCKETS_PER_HORIZON
        self.trend = fit_trend([p for p in self.floors if p.t >= oldest], min_rise)

    def expire_trend(self, point: Point) -> None:
        """Drop the trend if half of its rise is gone at comparable load, or samples stopped."""
        if self.trend is None:
            return
        newest = self.floors[-1]
        fell = newest.bytes - point.bytes > self.trend.rise / 2
        silent = point.t - newest.t > MAX_EMPTY_BUCKETS * self._width_s
        if silent or (fell and is_load_comparable(newest.load, point.load)):
            self.trend = None


class Trends:
    """Trends of one series over all horizons, of at least ``min_rise`` bytes."""

    def __init__(self, interval_s: float, min_rise: float) -> None:
        widths = sorted({max(width, interval_s) for width in BUCKET_WIDTHS_S})
        self.horizons = [Horizon(width) for width in widths]
        self.min_rise = min_rise

    def add(self, point: Point) -> None:
        """Add a sample, and update the trends of the horizons in which it completes a bucket."""
        swing = 0.0
        for horizon in reversed(self.horizons):
            completed = horizon.add(point)
            swing = max(swing, horizon.swing)
            if completed:
                horizon.update_trend(max(self.min_rise, SWING_FACTOR * swing))
        for horizon in self.horizons:
            horizon.expire_trend(point)

    def find_steepest(self, min_rise: float = 0.0) -> Trend | None:
        """Return the steepest trend that rises by ``min_rise`` bytes; None without such a trend."""
        trends = [horizon.trend for horizon in self.horizons if horizon.trend is not None]
        large = [trend for trend in trends if trend.rise >= min_rise]
        return max(large, key=lambda trend: trend.bytes_per_s, default=None)

    def clear(self) -> None:
        """Drop all floors and trends, but keep the swings."""
        for horizon in self.horizons:
            horizon.floors.clear()
            horizon.trend = None


class GrowthHistory:
    """Growth since the warm-up as points ``(t, growth, requests)``; older ones are farther apart.

    One array holds all, because many small allocations would fragment the heap.
    """

    def __init__(self, interval_s: float) -> None:
        self._latest_s = max(LATEST_GROWTH_WINDOW_S, MIN_LATEST_SAMPLES * interval_s)
        self._rows = array("d")
        self._limit = MAX_UNTHINNED_POINTS

    def __len__(self) -> int:
        return len(self._rows) // 3

    def add(self, t: float, growth: int, requests: int | None) -> None:
        """Add the ``growth`` in bytes at ``t``, and the number of completed requests."""
        self._rows.extend((t, growth, math.nan if requests is None else requests))
        if len(self) >= self._limit:
            self._thin_points(t)
            self._limit = len(self) + MAX_UNTHINNED_POINTS

    def subtract_growth(self, growth: int) -> None:
        """Subtract ``growth`` bytes from all points, because the base has risen by as much."""
        for number in range(1, len(self._rows), 3):
            self._rows[number] -= growth

    def measure_pace(self, low: int, part: float) -> float | None:
        """Return the pace of the growth since it was ``low`` bytes, in bytes per second.

        It is the mean pace or, if growth accelerates, that of the last ``part`` bytes, which took
        at least :data:`MIN_GROWTH_DURATION_S`. None if no time has passed.
        """
        rows = self._rows
        if not rows or rows[-3] <= rows[0]:
            return None
        begin = self._find_last_row(low + GROWTH_BEGIN_SHARE * (rows[-2] - low))
        latest = self._find_last_row(rows[-2] - part, rows[-3] - MIN_GROWTH_DURATION_S)
        return max(self._compute_pace(begin), self._compute_pace(latest))

    def measure_age(self) -> float:
        """Return how long the growth has taken at its mean pace, in seconds; 0 without growth."""
        if not self._rows:
            return 0.0
        pace = self._compute_pace(self._find_last_row(GROWTH_BEGIN_SHARE * self._rows[-2]))
        return self._rows[-2] / pace if pace > 0.0 else 0.0

    def measure_latest_pace(self) -> float:
        """Return the pace of the last :data:`LATEST_GROWTH_WINDOW_S`, in bytes per second."""
        if not self._rows:
            return 0.0
        return self._compute_pace(self._find_last_row(math.inf, self._rows[-3] - self._latest_s))

    def is_sustained(self, budget: int) -> bool:
        """Report whether the growth has lasted, continues, and neither fades nor is a step.

        Growth that fades counts only if its extrapolation exceeds ``budget`` bytes.
        """
        if not self._rows:
            return False
        points = self._list_points_since(GROWTH_BEGIN_SHARE)
        (begin, low, served), (now, high, served_now) = points[0], points[-1]
        lasted_s, rise = now - begin, high - low
        hasty = lasted_s < MIN_GROWTH_DURATION_S
        too_slow = rise * MIN_GROWTH_DURATION_S < FAST_BUDGET_SHARE * budget * lasted_s
        too_young = lasted_s < MIN_FAST_DURATION_S and rise < URGENT_BUDGET_FACTOR * budget
        if rise <= 0 or too_young or (hasty and too_slow):
            return False
        if self.measure_latest_pace() * lasted_s < MIN_LATER_HALF_SHARE * rise:
            return False
        steps = (later[1] - earlier[1] for earlier, later in pairwise(points))
        if max(steps) > MAX_STEP_SHARE * rise:
            return False
        middles = [[p[1] for p in points if p[0] <= (begin + now) / 2][-1]]
        if served_now - served >= MIN_TREND_POINTS:
            middles.append([p[1] for p in points if not p[2] > (served + served_now) / 2][-1])
        halves = [(middle - low, high - middle) for middle in middles]
        if hasty:
            return any(later >= MIN_FAST_HALF_SHARE * earlier for earlier, later in halves)
        # The remaining halves are a geometric series with these two terms.
        return any(
            later >= earlier
            or (
                later >= MIN_LATER_HALF_SHARE * earlier
                and high + later * later / (earlier - later) >= budget
            )
            for earlier, later in halves
        )

    def _find_last_row(self, growth: float, t: float = math.inf) -> int:
        """Return where the last point until ``t`` of at most ``growth`` begins, or the first."""
        number = len(self._rows) - 3
        while number > 0 and (self._rows[number + 1] > growth or self._rows[number] > t):
            number -= 3
        return number

    def _compute_pace(self, number: int) -> float:
        elapsed_s = self._rows[-3] - self._rows[number]
        return (self._rows[-2] - self._rows[number + 1]) / elapsed_s if elapsed_s > 0.0 else 0.0

    def _list_points_since(self, share: float) -> list[tuple[float, float, float]]:
        rows, begin = self._rows, self._find_last_row(share * self._rows[-2])
        return [(rows[n], rows[n + 1], rows[n + 2]) for n in range(begin, len(rows), 3)]

    def _thin_points(self, now: float) -> None:
        kept = self._rows[:3]
        for number in range(3, len(self._rows), 3):
            t = self._rows[number]
            if t - kept[-3] > (now - t) / POINTS_PER_E_FOLD:
                kept.extend(self._rows[number : number + 3])
        self._rows = kept


class SegmentGrowth:
    """Growth of each segment since the first sample."""

    def __init__(self) -> None:
        self._bases: dict[Segment, int] = {}
        self._newest: dict[Segment, int] = {}
        self._declared: tuple[int, int] | None = None

    def add(self, sizes: Mapping[Segment, int], declared: int) -> None:
        """Add the sizes of a sample, and the total bytes of all declared caches."""
        self._bases = {**sizes, **self._bases}
        self._newest |= sizes
        self._declared = (self._declared[0] if self._declared else declared, declared)

    def find_largest(self) -> Segment | None:
        """Return the segment that grew most beyond declared caches; None without segments.

        The ledger names no segments, so caches count in the one that leaves the least unexplained.
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
    """Smallest growth within a sliding window, over the means of all slots but the current one."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._slot_s = window_s / SLOTS_PER_WINDOW
        self._slots: deque[tuple[float, float, int]] = deque(maxlen=SLOTS_PER_WINDOW + 2)

    def start(self, t: float) -> None:
        """Add the baseline, with a growth of 0, as the first slot."""
        self._slots.append((t - self._slot_s, 0.0, 1))

    def add(self, t: float, growth: int) -> None:
        """Add the ``growth`` in bytes at ``t``, and drop slots older than the window."""
        since, mean, count = self._slots[-1]
        if t >= since + self._slot_s:
            self._slots.append((t, float(growth), 1))
        else:
            self._slots[-1] = (since, mean + (growth - mean) / (count + 1), count + 1)
        while len(self._slots) > 2 and self._slots[0][0] < t - self._window_s - self._slot_s:
            self._slots.popleft()

    def find_minimum(self) -> int:
        """Return the smallest mean of all completed slots, in bytes."""
        means = [mean for _, mean, _ in self._slots]  # the minimum of single samples is noise
        # Without the current slot, growth is not compared with itself.
        return int(min(means[:-1] or means))
