"""Sums over ranks that are processes: right to a rounding, and the same bits on every rank.

Tests ``kernels/rank_sums.py``, ``kernels/rank_sum_kernels.py`` and ``kernels/rank_sum_layout.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from plimsoll_engine.kernels.rank_sum_layout import ALIGNMENT, Layout
from tests.summing_ranks import Ranks, Task, ranks

MOST = 4
ROWS = 10
EPS = 1e-5
NOISE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BOUNDS = ((2, 5), (5, 5), (0, 3), (0, 0))
"""Of rows in words and rows that every rank sums: all ways to sum are met within :data:`ROWS`."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Ranks]:
    with ranks(MOST) as made:
        yield made


def expected(
    parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """By float64: the sum rounded once, and its norm."""
    total = torch.stack(parts).double().sum(0) + residual.double()
    wide = total.to(residual.dtype).double()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    return norm, wide


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, tuple[int, int], int, torch.dtype, list[int], int]:
    return (
        draw(st.integers(2, MOST)),
        draw(st.sampled_from(BOUNDS)),
        16 * draw(st.integers(1, 20)),
        draw(st.sampled_from(list(NOISE))),
        draw(st.lists(st.integers(1, ROWS), min_size=1, max_size=4)),
        draw(st.integers(0, 2**31)),
    )


@given(cases())
@example((4, (2, 4), 48, torch.bfloat16, [1, 3, 5, 4, 10, 2], 1))
@example((3, (0, 3), 32, torch.float32, [10, 9, 3, 10], 2))
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # seconds each
def test_sums_of_any_shape_in_any_order(
    processes: Ranks, case: tuple[int, tuple[int, int], int, torch.dtype, list[int], int]
) -> None:
    size, (word_rows, whole_rows), columns, dtype, rows, seed = case
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layout = Layout(size, ROWS, columns, dtype.itemsize, word_rows, whole_rows)
    weight = drawn(columns)
    residuals = [drawn(count, columns) for count in rows]
    parts = [[drawn(count, columns) for _ in range(size)] for count in rows]
    with tempfile.TemporaryDirectory() as folder:
        buffers = [Path(folder) / str(rank) for rank in range(size)]
        for path in buffers:
            path.write_bytes(bytes(layout.nbytes))
        found = processes.compute(
            [
                Task(
                    rank, layout, dtype, buffers, [one[rank] for one in parts],
                    [one.clone() for one in residuals], weight, EPS,
                )
                for rank in range(size)
            ]
        )  # fmt: skip
    for number, count in enumerate(rows):
        norm, total = expected(parts[number], residuals[number], weight)
        first = found[0][number][0]
        error = (first.double() - norm).norm() / norm.norm()
        assert error < NOISE[dtype]
        kept = torch.zeros(count, dtype=torch.int64)
        for rank in range(size):
            own, residual = found[rank][number]
            assert torch.equal(own.view(torch.uint8), first.view(torch.uint8)), "other bits"
            off = (residual.double() - total).abs()
            right = (off <= NOISE[dtype] * (0.1 + total.abs())).all(-1)
            kept += right.long()
        if count <= whole_rows:
            assert bool((kept == size).all()), "every rank keeps the whole residual"
        else:
            assert bool((kept == 1).all()), "every row is kept by one rank"
            others = torch.stack([found[rank][number][1] for rank in range(size)]).ne(0).any(-1)
            assert bool((others.sum(0) <= 1).all()), "and is zeros on the others"


@pytest.mark.parametrize("whole_rows", [0, 100, 10_000])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_regions_do_not_overlap(size: int, whole_rows: int) -> None:
    layout = Layout(size, 5000, 4096, 2, 64, whole_rows)
    places = [
        layout.arrived, layout.finished, layout.words, layout.parts, layout.results, layout.nbytes
    ]  # fmt: skip
    assert places == sorted(places)
    assert all(place % ALIGNMENT == 0 for place in places)
    assert layout.arrived >= 8 * (size + 1)
    assert layout.finished - layout.arrived >= 2 * size * 5000 * 4
    assert layout.words - layout.finished >= 2 * 5000 * 4
    assert layout.parts - layout.words >= 2 * size * 64 * 4096 * 2 // 4 * 8
    # Shared out, a rank gets its share of the rows; else all of them, from each other rank.
    share = max(min(whole_rows, 5000), -(-5000 // size))
    assert layout.results - layout.parts >= 2 * (size - 1) * share * 4096 * 2
    results = 5000 if whole_rows < 5000 else 0
    assert layout.nbytes - layout.results >= results * 4096 * 2
