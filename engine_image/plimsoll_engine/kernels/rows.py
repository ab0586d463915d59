"""Rows of a matrix by their numbers, and the ids of a step's tokens.

Small work that torch has too; but the first use of each of its kernels loads a library module,
which together is .06 s of every restart. These load in a millisecond.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import after_last, let_next, overlap
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["index"])
def _rows(x, index, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next(OVERLAP)
    after_last(OVERLAP)
    source = tl.load(index + row).to(tl.int64)
    value = tl.load(x + source * size + column, mask=column < size)
    tl.store(out + row * size + column, value, mask=column < size)


def rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x`` [n, size] at ``index`` int32 or int64 [rows]; [rows, size]."""
    size = x.shape[1]
    out = x.new_empty(len(index), size)
    block = min(2048, next_power_of_2(size))
    _rows[(len(index), cdiv(size, block))](
        x, index, out, size, BLOCK=block, num_warps=4, **overlap(x.device)
    )
    return out


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids", "sources"])
def _take(
    ids, sources, newest, out, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    let_next(OVERLAP)
    after_last(OVERLAP)
    source = tl.load(sources + at, mask=inside, other=-1)
    known = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    sampled = tl.load(newest + source, mask=source >= 0, other=0)
    sampled = tl.maximum(sampled, 0)  # of a row that had no token
    tl.store(out + at, tl.where(source >= 0, sampled, known), mask=inside)


def take(ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Return ``ids``, but ``newest`` at ``sources`` where that is not negative, and at least 0.

    ``ids`` and ``sources`` are int32 [tokens], ``newest`` and the result int64, the result
    [tokens].
    """
    out = newest.new_empty(len(ids))
    _take[(cdiv(len(ids), 256),)](
        ids, sources, newest, out, len(ids), BLOCK=256, **overlap(ids.device)
    )
    return out
