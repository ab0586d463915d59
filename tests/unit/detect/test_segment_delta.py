"""Which segment grew: its floors at the begin and now, whatever lies between.

Tests ``detect/growth.py``.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_sidecar.detect.growth import BUCKETS, WIDTHS_S, Point, SegmentDelta, largest_growth

MIB = 1 << 20


def risen(sizes: list[int], interval_s: float = 1.0) -> int:
    rise = SegmentDelta(interval_s)
    for number, size in enumerate(sizes):
        rise.add(Point(number * interval_s, size))
    return rise.bytes


def test_nothing_is_known_before_the_first_bucket_is_full() -> None:
    assert risen([]) == risen([5 * MIB]) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 8 * MIB), min_size=120, max_size=200), st.integers(1, 512))
def test_growth_shows_through_noise(noise: list[int], mib: int) -> None:
    grown = [size + (mib * MIB if number >= 60 else 0) for number, size in enumerate(noise)]
    assert abs(risen(grown) - mib * MIB) <= 8 * MIB


def test_it_is_counted_from_the_floor_of_the_widest_bucket_that_is_full() -> None:
    spikes = [100 * MIB if number % 7 else 60 * MIB for number in range(1000)]
    assert risen([*spikes, 90 * MIB, 90 * MIB]) == 30 * MIB


def test_what_was_before_is_forgotten() -> None:
    rise = SegmentDelta(1.0)
    for t in range(100):
        rise.add(Point(float(t), t * MIB))
    rise.clear()
    assert rise.bytes == 0
    for t in range(100, 110):
        rise.add(Point(float(t), 200 * MIB))
    assert rise.bytes == 0


def test_a_run_of_weeks_is_measured_over_the_last_of_them() -> None:
    widest = WIDTHS_S[-1]
    assert risen([n * MIB for n in range(3 * BUCKETS)], widest) == (BUCKETS - 1) * MIB


def grown(*rises: int, declared: int = 0) -> dict[int, SegmentDelta]:
    """Segments that rise by so many MiB while the ledger's caches grow by ``declared`` MiB."""
    deltas = {number: SegmentDelta(1.0) for number in range(len(rises))}
    for t in range(101):
        for number, rise in enumerate(rises):
            deltas[number].add(
                Point(float(t), (300 + rise * t // 100) * MIB, declared * t * MIB // 100)
            )
    return deltas


def test_the_segment_that_grew_most_is_named() -> None:
    assert largest_growth({}) is None
    assert largest_growth(grown(5, 90, 20)) == 1
    assert largest_growth(grown(-50, -5, -20)) == 1, "all fell: the one that fell the least"


def test_a_declared_cache_beside_the_leak_is_not_named() -> None:
    """The cache is larger than the leak, and holds a little more than it counts."""
    assert largest_growth(grown(220, 0, 60, declared=200)) == 2
    assert largest_growth(grown(220, 0, 400, declared=200)) == 2


def test_a_cache_in_the_segment_of_the_leak_hides_nothing() -> None:
    assert largest_growth(grown(280, 4, declared=200)) == 0
