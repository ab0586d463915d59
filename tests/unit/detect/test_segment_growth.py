"""Which segment grew, beyond declared caches.

Tests ``detect/growth.py``.
"""

from __future__ import annotations

from plimsoll_api.assessment import Segment
from plimsoll_sidecar.detect.growth import SegmentGrowth

MIB = 1 << 20
NAMES = (Segment.PYTHON_OBJECTS, Segment.MALLOC_IN_USE, Segment.ANONYMOUS_OTHER)


def grown(*rises: int, declared: int = 0) -> SegmentGrowth:
    """Segments that rise by so many MiB while the ledger's caches grow by ``declared`` MiB."""
    growth = SegmentGrowth()
    for t in range(101):
        sizes = [(300 + rise * t // 100) * MIB for rise in rises]
        growth.add(dict(zip(NAMES, sizes, strict=True)), declared * t * MIB // 100)
    return growth


def test_nothing_is_named_without_a_sample() -> None:
    assert SegmentGrowth().find_largest() is None


def test_the_segment_that_grew_most_is_named() -> None:
    assert grown(5, 90, 20).find_largest() is NAMES[1]
    assert grown(-50, -5, -20).find_largest() is NAMES[1], "all fell: the one that fell the least"


def test_a_declared_cache_beside_the_leak_is_not_named() -> None:
    """The cache is larger than the leak, and holds a little more than it counts."""
    assert grown(220, 0, 60, declared=200).find_largest() is NAMES[2]
    assert grown(220, 0, 400, declared=200).find_largest() is NAMES[2]


def test_a_cache_in_the_segment_of_the_leak_hides_nothing() -> None:
    assert grown(280, 4, 0, declared=200).find_largest() is NAMES[0]
