"""Which decode graphs are captured before the engine serves. Tests ``core/graphs.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.core.graphs import FIRST, in_order, sizes_up_to
from plimsoll_engine.kernels.decode_cut import Cut, cut_for


def cuts(kv_heads: int, limit: int) -> Callable[[int], Cut]:
    return lambda size: cut_for(size, kv_heads, 256, limit)


@given(st.integers(1, 1024), st.integers(1, 16), st.sampled_from([4096, 8192, 131_072]))
def test_no_cut_is_left_for_when_streams_run(rows: int, kv_heads: int, limit: int) -> None:
    sizes, cut = sizes_up_to(rows), cuts(kv_heads, limit)
    first, rest = in_order(sizes, cut)
    assert sorted(first + rest) == sizes
    assert first[0] == rows
    assert {cut(size) for size in rest} <= {cut(size) for size in first}
    assert len(first) <= FIRST + len({cut(size) for size in sizes})


@pytest.mark.parametrize(
    ("kv_heads", "expected"), [(8, [256, 1, 24, 96, 80, 16]), (1, [256, 1, 24, 96])]
)
def test_the_largest_size_of_each_cut_that_is_missing(kv_heads: int, expected: list[int]) -> None:
    assert in_order(sizes_up_to(256), cuts(kv_heads, 131_072))[0] == expected
