"""Sums and collectives over ranks that are processes, right and the same bits on every rank.

Tests ``kernels/all_reduce.py``, ``kernels/all_reduce_kernels.py``,
``kernels/collective_buffer.py`` and ``kernels/collectives.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from plimsoll_engine.kernels.collective_buffer import BUFFER_ALIGNMENT_BYTES, BufferLayout
from tests.summing_ranks import Ranks, Task, ranks

Exchange = tuple[str, torch.dtype, tuple[int, ...]]
Case = tuple[int, tuple[int, int], int, torch.dtype, list[int], list[Exchange], int]
"""Ranks, bounds, columns, dtype, rows of each sum, collectives between the sums, and a seed."""

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


EXCHANGES = {
    "all_gather": (torch.bfloat16, torch.float32, torch.int32),
    "all_reduce": (torch.bfloat16, torch.float32, torch.float64, torch.int64),
    "all_reduce_max": (torch.int64, torch.float32),
    "broadcast": (torch.int64, torch.bfloat16, torch.uint8),
}
"""Collectives, with dtypes of each."""
EACH: list[Exchange] = [
    ("all_gather", torch.bfloat16, (3, 72)), ("all_reduce_max", torch.int64, (7,)),
    ("broadcast", torch.int64, (5,)), ("all_reduce", torch.bfloat16, (4, 48)),
    ("all_gather", torch.float32, (5, 9)), ("broadcast", torch.uint8, (1,)),
    ("all_reduce", torch.int64, (700,)), ("all_reduce_max", torch.int64, (0,)),
]  # fmt: skip
"""Each of them, also larger than the buffers, empty, and of rows that are no vectors."""


def collect(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """What the collective ``name`` of ``parts``, one of each rank, returns."""
    stacked = torch.stack(parts)
    if name == "all_gather":
        return stacked
    if name == "all_reduce":
        wide = stacked.float() if stacked.dtype in (torch.bfloat16, torch.float16) else stacked
        total = wide[0]
        for part in wide[1:]:
            total = total + part
        return total.to(stacked.dtype)
    return stacked.amax(0) if name == "all_reduce_max" else parts[0]


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    name = draw(st.sampled_from(list(EXCHANGES)))
    dtype = draw(st.sampled_from(EXCHANGES[name]))
    columns = st.one_of(st.integers(0, 40), st.integers(1, 80).map(lambda eighth: 8 * eighth))
    shape = draw(st.tuples(columns) | st.tuples(st.integers(0, 5), columns))
    return name, dtype, shape


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return (
        draw(st.integers(2, MOST)),
        draw(st.sampled_from(BOUNDS)),
        16 * draw(st.integers(1, 20)),
        draw(st.sampled_from(list(NOISE))),
        draw(st.lists(st.integers(1, ROWS), min_size=1, max_size=4)),
        draw(st.lists(exchanges(), max_size=6)),
        draw(st.integers(0, 2**31)),
    )


@given(cases())
@example((4, (2, 4), 48, torch.bfloat16, [1, 3, 5, 4, 10, 2], EACH, 1))
@example((3, (0, 3), 32, torch.float32, [10, 9, 3, 10], EACH, 2))
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # seconds each
def test_sums_of_any_shape_in_any_order(processes: Ranks, case: Case) -> None:
    size, (word_rows, whole_rows), columns, dtype, rows, wanted, seed = case
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layout = BufferLayout(size, ROWS, columns, dtype.itemsize, word_rows, whole_rows)
    weight = drawn(columns)
    residuals = [drawn(count, columns) for count in rows]
    parts = [[drawn(count, columns) for _ in range(size)] for count in rows]
    exchanged = [
        [(10 * torch.randn(shape, generator=generator)).to(kind) for _ in range(size)]
        for _, kind, shape in wanted
    ]
    with tempfile.TemporaryDirectory() as folder:
        buffers = [Path(folder) / str(rank) for rank in range(size)]
        for path in buffers:
            path.write_bytes(bytes(layout.nbytes))
        found = processes.compute(
            [
                Task(
                    rank, layout, dtype, buffers, [one[rank] for one in parts],
                    [one.clone() for one in residuals], weight, EPS,
                    [
                        (name, one[rank])
                        for (name, _, _), one in zip(wanted, exchanged, strict=True)
                    ],
                )
                for rank in range(size)
            ]
        )  # fmt: skip
    for number, count in enumerate(rows):
        norm, total = expected(parts[number], residuals[number], weight)
        first = found[0][0][number][0]
        error = (first.double() - norm).norm() / norm.norm()
        assert error < NOISE[dtype]
        kept = torch.zeros(count, dtype=torch.int64)
        for rank in range(size):
            own, residual = found[rank][0][number]
            assert torch.equal(own.view(torch.uint8), first.view(torch.uint8)), "other bits"
            off = (residual.double() - total).abs()
            right = (off <= NOISE[dtype] * (0.1 + total.abs())).all(-1)
            kept += right.long()
        if count <= whole_rows:
            assert bool((kept == size).all()), "every rank keeps the whole residual"
        else:
            assert bool((kept == 1).all()), "every row is kept by one rank"
            others = torch.stack([found[rank][0][number][1] for rank in range(size)]).ne(0).any(-1)
            assert bool((others.sum(0) <= 1).all()), "and is zeros on the others"
    for number, (name, kind, _) in enumerate(wanted):
        right = collect(name, exchanged[number])
        first = found[0][1][number]
        assert all(torch.equal(answers[number], first) for _, answers in found), (name, kind)
        # Triton's interpreter does not round to the nearest bfloat16.
        noise = NOISE[kind] if name == "all_reduce" and kind in NOISE else 0.0
        torch.testing.assert_close(first, right, rtol=noise, atol=0.0)


@pytest.mark.parametrize("whole_rows", [0, 100, 10_000])
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_regions_do_not_overlap(size: int, whole_rows: int) -> None:
    layout = BufferLayout(size, 5000, 4096, 2, 64, whole_rows)
    places = [
        layout.part_signals_offset, layout.result_signals_offset, layout.words_offset,
        layout.parts_offset, layout.results_offset, layout.nbytes
    ]  # fmt: skip
    assert places == sorted(places)
    assert all(place % BUFFER_ALIGNMENT_BYTES == 0 for place in places)
    assert layout.part_signals_offset >= 8 * (size + 1)
    assert layout.result_signals_offset - layout.part_signals_offset >= 2 * size * 5000 * 4
    assert layout.words_offset - layout.result_signals_offset >= 2 * 5000 * 4
    assert layout.parts_offset - layout.words_offset >= 2 * size * 64 * 4096 * 2 // 4 * 8
    # Shared out, a rank gets its share of the rows; else all of them, from each other rank.
    share = max(min(whole_rows, 5000), -(-5000 // size))
    assert layout.results_offset - layout.parts_offset >= 2 * (size - 1) * share * 4096 * 2
    results = 5000 if whole_rows < 5000 else 0
    assert layout.nbytes - layout.results_offset >= results * 4096 * 2
