"""Whether memory rises over time at comparable load, and how fast: a robust trend.

Theil–Sen's slope (the median over pairs of points) with Kendall's tau as its confidence, restricted
to *conclusive* pairs. Memory follows load, so a rise is conclusive only where the load did not rise
with it, and a fall only where the load did not fall. Steps are no trend: a burst leaves an
allocator's high-water mark behind, and a cache is filled once; all thirds of a trend must rise.
What a trend may mean is weighed in ``odds.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from plimsoll_sidecar.detect.leak.thresholds import THRESHOLDS

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
