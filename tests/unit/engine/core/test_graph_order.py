"""Which decode graphs are captured before the engine serves. Tests ``core/execute/graphs.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.core.execute.graphs import (
    MIN_SIZES_BEFORE_SERVING,
    DecodeGraphs,
    list_capture_sizes,
    split_capture_sizes,
)
from plimsoll_engine.kernels.decode_partition import Partition, choose_partition
from plimsoll_engine.kernels.sizes import pad_few_rows


def cuts(kv_heads: int, limit: int) -> Callable[[int], Partition]:
    return lambda size: choose_partition(size, kv_heads, 256, limit)


@given(st.integers(1, 1024), st.integers(1, 16), st.sampled_from([4096, 8192, 131_072]))
def test_no_cut_is_left_for_when_streams_run(rows: int, kv_heads: int, limit: int) -> None:
    sizes, cut = list_capture_sizes(rows), cuts(kv_heads, limit)
    first, rest = split_capture_sizes(sizes, cut)
    assert sorted(first + rest) == sizes
    assert first[0] == rows
    assert {cut(size) for size in rest} <= {cut(size) for size in first}
    assert len(first) <= MIN_SIZES_BEFORE_SERVING + len({cut(size) for size in sizes})


@pytest.mark.parametrize(
    ("kv_heads", "expected"), [(8, [256, 1, 24, 96, 8]), (1, [256, 1, 24, 96, 64])]
)
def test_the_largest_size_of_each_cut_that_is_missing(kv_heads: int, expected: list[int]) -> None:
    assert split_capture_sizes(list_capture_sizes(256), cuts(kv_heads, 131_072))[0] == expected


def test_products_of_few_rows_are_compiled_before_the_engine_serves() -> None:
    """Their kernels are for 16 and for 32 rows."""
    first, _ = split_capture_sizes(list_capture_sizes(256), pad_few_rows)
    assert {pad_few_rows(size) for size in first} == {0, 16, 32}
    first, _ = split_capture_sizes(list_capture_sizes(8), pad_few_rows)
    assert {pad_few_rows(size) for size in first} == {16}


def test_a_size_without_memory_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of it take the next larger graph, and the others are captured all the same."""
    graphs = object.__new__(DecodeGraphs)  # its own beginning needs a GPU
    graphs._graphs, graphs._missing = {}, [8, 4, 2]
    tried: list[int] = []

    def capture(size: int) -> None:
        tried.append(size)
        if size == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        graphs._graphs[size] = cast(Any, None)

    monkeypatch.setattr(graphs, "_capture", capture)
    while graphs.capture_next():
        pass
    assert tried == [8, 4, 2]
    assert not graphs.has_uncaptured_sizes
    assert [graphs.has_graph(rows) for rows in (1, 3, 8, 9)] == [True, True, True, False]
