"""The best column of each row: the next token of a greedy request.

A row of logits is cut into parts, one program each, so that one row fills the chip as well; a
second kernel takes the best of the parts. Of equal ones it is the first, as in torch; what is not a
number is never the best, so that the answer is a column of the row whatever it holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import after_last, let_next, overlap

BLOCK = 4096


@triton.jit
def _best_of_parts(
    x, best, where, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    let_next(OVERLAP)
    after_last(OVERLAP)
    value = tl.load(x + row * columns + column, mask=column < columns, other=float("-inf"))
    value = value.to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))  # not a number: never the best
    highest, at = tl.max(value, axis=0, return_indices=True)
    place = row * tl.num_programs(1) + part
    tl.store(best + place, highest)
    tl.store(where + place, part * BLOCK + at)


@triton.jit
def _best(
    best, where, out, parts, PARTS_PAD: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    let_next(OVERLAP)
    after_last(OVERLAP)
    value = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    _, at = tl.max(value, axis=0, return_indices=True)
    tl.store(out + row, tl.load(where + row * parts + at).to(tl.int64))


def argmax(x: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the column of the highest value in each row of ``x`` [rows, columns]."""
    rows, columns = x.shape
    parts = triton.cdiv(columns, BLOCK)
    best = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=x.device)
    out = torch.empty(rows, dtype=torch.int64, device=x.device)
    launch = overlap(x.device)
    _best_of_parts[(rows, parts)](x, best, where, columns, BLOCK=BLOCK, num_warps=4, **launch)
    _best[(rows,)](
        best, where, out, parts, PARTS_PAD=triton.next_power_of_2(parts), num_warps=1,
        **launch,
    )  # fmt: skip
    return out
