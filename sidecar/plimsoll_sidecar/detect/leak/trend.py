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
LEAST_TAU = 0.7
"""What reaches less is not even weighed: with 8 points, chance alone reaches it in one of 100."""
LEAST_NOISE = 10_000.0
"""Bytes. Memory is counted in pages of 4 KiB: two or three of them are no noise."""
MIN_SHARE, MAX_SHARE = 0.05, 20.0
"""Bounds of a later half's rise as a share of the earlier half's: beyond them it is a step."""
THIRD_SHARE = 0.2
"""The middle and the last third of a trend each bring at least this share of its rise."""
BUSIER_TAU, MIN_BUSIER_RATIO = 0.45, 0.5
"""Kendall's tau of the load from which it climbs, over the pairs that differ, if enough do: a load
that climbs slowly is comparable from each point to the next, and not in the end."""
_LOAD_SLACK = 1.1


@dataclass(frozen=True, slots=True)
class Point:
    """A floor of memory. ``declared`` is what the engine's ledger accounted for at that moment.

    Bytes and seconds; ``load`` counts requests in flight, ``requests`` those of the epoch and
    ``collections`` the full garbage collections; each is None where unknown.
    """

    t: float
    bytes: int
    declared: int = 0
    load: int | None = None
    requests: int | None = None
    collections: int | None = None


@dataclass(frozen=True, slots=True)
class Trend:
    """A rise over ``span_s``.

    ``confidence`` is Kendall's tau; ``busier`` says that the load rose with it, and ``sound`` that
    it is no step and no noise.

    The odds look closer: ``fading`` is the logarithm of the later half's rise as a share of the
    earlier half's, ``climb`` says how the load climbed (from -1 to 1, like Kendall's tau), and
    ``collections`` how many full garbage collections it outlasted, None where they are not counted.
    """

    bytes_per_s: float
    rise: float
    span_s: float
    confidence: float
    noise: float
    bytes_per_request: float | None
    busier: bool
    sound: bool
    fading: float
    climb: float
    collections: int | None

    @property
    def clearness(self) -> float:
        """The logarithm of the rise as a multiple of the deviation from the line."""
        return math.log(max(1.0, self.rise) / max(LEAST_NOISE, self.noise))


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
    """Return the trend of points in order of time; None for a rise of less than ``min_rise``."""
    if len(points) < MIN_POINTS:
        return None
    first, last, at = points[0], points[-1], THRESHOLDS
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
    if tau < LEAST_TAU or rise < min_rise:
        return None
    levels = [unexplained(first, p) for p in points]
    noise = _deviation(points, levels, slope)
    begin, middle, end = _thirds(levels)
    first_half, second_half = middle - begin, end - middle
    thirds = min(first_half, second_half) >= THIRD_SHARE * rise
    share = second_half / max(1.0, first_half)
    differ = max(differ, MIN_BUSIER_RATIO * pairs)
    return Trend(
        bytes_per_s=slope,
        rise=rise,
        span_s=span,
        confidence=tau,
        noise=noise,
        bytes_per_request=_per_request(first, last, rise),
        busier=busier >= BUSIER_TAU * differ,
        sound=tau >= at.tau and thirds,
        fading=math.log(min(MAX_SHARE, max(MIN_SHARE, share))),
        climb=busier / differ,
        collections=_between(first.collections, last.collections),
    )


def _between(first: int | None, last: int | None) -> int | None:
    return None if first is None or last is None else last - first


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
