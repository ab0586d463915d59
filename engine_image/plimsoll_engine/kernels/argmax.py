"""Argmax of each row of logits, which is the next token of a greedy request.

If several columns have the maximum, the first is returned. NaN is ignored, and the result for a row
of only NaN and -inf is -1. With added noise, the argmax is a sample from the row's softmax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.draw import (
    HASH_MULTIPLIER_1,
    HASH_MULTIPLIER_2,
    LARGEST_BELOW_ONE,
    UNIFORM_STEP,
)
from plimsoll_engine.kernels.ops import KEY_LOWER_MASK
from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2

COLUMNS_PER_PART = 4096
KEY_LOWER_BITS = tl.constexpr(KEY_LOWER_MASK)
MULTIPLIER_1, MULTIPLIER_2 = tl.constexpr(HASH_MULTIPLIER_1), tl.constexpr(HASH_MULTIPLIER_2)
STEP_OF_31_BITS, MAX_UNIFORM = tl.constexpr(UNIFORM_STEP), tl.constexpr(LARGEST_BELOW_ONE)


@triton.jit
def _find_best_of_part(
    x, best, where, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    value = tl.load(x + row * columns + column, mask=column < columns, other=float("-inf"))
    value = value.to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))  # ignore NaN
    highest, index = tl.max(value, axis=0, return_indices=True)
    offset = row * tl.num_programs(1) + part
    tl.store(best + offset, highest)
    tl.store(where + offset, part * BLOCK + index)


@triton.jit
def _find_best_noisy_of_part(
    x, scales, keys, best, where, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    value = tl.load(x + row * columns + column, mask=column < columns, other=float("-inf"))
    value = value.to(tl.float32) * tl.load(scales + row)
    bits = column.to(tl.int32) ^ tl.load(keys + row * 2)
    bits ^= (bits >> 16) & 0xFFFF
    bits *= MULTIPLIER_1
    low = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * STEP_OF_31_BITS
    bits ^= tl.load(keys + row * 2 + 1)
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= MULTIPLIER_2
    bits ^= (bits >> 16) & 0xFFFF
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + low) * STEP_OF_31_BITS
    uniform = tl.minimum(uniform, MAX_UNIFORM)
    # log1p(-uniform), with the rounding error of 1 - uniform corrected.
    complement = 1.0 - uniform
    exponential = tl.where(
        complement == 1.0, uniform, -tl.log(complement) * (uniform / (1.0 - complement))
    )
    value -= tl.log(exponential)
    value = tl.where(value == value, value, float("-inf"))  # ignore NaN
    highest, index = tl.max(value, axis=0, return_indices=True)
    offset = row * tl.num_programs(1) + part
    tl.store(best + offset, highest)
    tl.store(where + offset, part * BLOCK + index)


@triton.jit(do_not_specialize=["first"])
def _find_best_of_parts(
    best, where, out, parts, first, KEYS: tl.constexpr, PARTS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    value = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    highest, index = tl.max(value, axis=0, return_indices=True)
    result = tl.load(where + row * parts + index).to(tl.int64)
    if KEYS:
        # Map the float to an integer of the same order. Adding 0.0 makes -0.0 equal to 0.0.
        bits = (highest + 0.0).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        result = (ordered.to(tl.int64) << 32) | (KEY_LOWER_BITS - (first + result))
    else:
        result = tl.where(highest == float("-inf"), -1, result)
    tl.store(out + row, result)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Return the column of each row's maximum in ``x`` [rows, columns], as int64 [rows]."""
    return _find_row_maxima(x, 0, return_keys=False)


def draw(x: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample a column of each row, as :func:`plimsoll_engine.kernels.draw.draw` does."""
    return _find_row_maxima(x, 0, return_keys=False, noise=(scales, keys))


def compute_argmax_keys(x: torch.Tensor, first_column: int) -> torch.Tensor:
    """Return a key for each row's maximum in ``x`` [rows, columns], as int64 [rows]."""
    return _find_row_maxima(x, first_column, return_keys=True)


def _find_row_maxima(
    x: torch.Tensor,
    first_column: int,
    return_keys: bool,
    noise: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    # Keys need ``first_column``, the number of the first column of ``x`` in the whole row.
    # ``noise`` are the ``scales`` and ``keys`` of draw().
    rows, columns = x.shape
    parts = cdiv(columns, COLUMNS_PER_PART)
    best = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=x.device)
    out = torch.empty(rows, dtype=torch.int64, device=x.device)
    launch = get_launch_options(x.device)
    if noise is None:
        _find_best_of_part[(rows, parts)](
            x, best, where, columns, BLOCK=COLUMNS_PER_PART, num_warps=4, **launch
        )
    else:
        _find_best_noisy_of_part[(rows, parts)](
            x, *noise, best, where, columns, BLOCK=COLUMNS_PER_PART, num_warps=4, **launch
        )
    _find_best_of_parts[(rows,)](
        best, where, out, parts, first_column, KEYS=return_keys, PARTS_PAD=next_power_of_2(parts),
        num_warps=1, **launch,
    )  # fmt: skip
    return out
