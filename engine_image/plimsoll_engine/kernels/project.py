"""Matrix-vector product, fused with the operations around it in a decoder layer.

It is memory-bound and short, so separate launches for the norm, the activation and the addition
would double the time. A quantized matrix is read in its quantized form, but the row is not
quantized.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.quantized import Quantized, Weight
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2


class Tile(NamedTuple):
    """Tile of one program: up to ``columns`` columns and ``elements`` matrix elements."""

    columns: int
    elements: int
    warps: int


# The programs of a larger matrix fill the GPU many times.
MIN_LARGE_ELEMENTS = 1 << 24
# By (is the matrix quantized, is it large). These tiles are the fastest on an H200 for the products
# of a 0.6B and an 8B model (bench/project.py).
TILES = {
    (False, False): Tile(4096, 16_384, 4), (False, True): Tile(2048, 8192, 8),
    (True, False): Tile(4096, 4096, 4), (True, True): Tile(2048, 8192, 4),
}  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _project(
    x, norm, weight, scales, bias, out, rows, eps,
    COLUMNS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    ADD: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    allow_next_kernel(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    second = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    # Unroll, and apply the norm's factor at the end, so that no load waits for a sum.
    for start in tl.static_range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_mask = column < COLUMNS
        offsets = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
        if SCALED:
            # A thread gets the same columns of the matrix and of the 16-bit x. Otherwise x moves
            # between threads through shared memory, whose barriers delay the next loads.
            offsets = tl.max_contiguous(offsets, [1, 8])
        mask = row_mask[:, None] & column_mask[None, :]
        part = tl.load(weight + offsets, mask=mask, other=0.0)
        if SILU:
            up = tl.load(weight + tl.cast(rows, tl.int64) * COLUMNS + offsets, mask=mask, other=0.0)
        if start == 0:
            wait_for_previous_kernel(OVERLAP)
        value = tl.load(x + column, mask=column_mask, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + column, mask=column_mask, other=0.0).to(tl.float32)
        total += part.to(tl.float32) * value[None, :]
        if SILU:
            second += up.to(tl.float32) * value[None, :]
    inverse = 1.0
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
    result = tl.sum(total, axis=1) * inverse
    if SCALED:
        result *= tl.load(scales + row, mask=row_mask, other=0.0)
    if BIAS:
        result += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)
    if SILU:
        gated = tl.sum(second, axis=1) * inverse
        if SCALED:
            gated *= tl.load(scales + rows + row, mask=row_mask, other=0.0)
        if BIAS:
            gated += tl.load(bias + rows + row, mask=row_mask, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * gated
    if ADD:
        result += tl.load(out + row, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row_mask)


def project(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` as [1, rows].

    ``x`` is [1, columns], and ``weight`` [rows, columns]. If ``norm`` [columns] is given, ``x`` is
    first normalised by RMSNorm. With ``silu``, the result is silu(first half) * second half. If
    ``into`` is given, the result is added to it in place.
    """
    columns = x.shape[1]
    scaled = isinstance(weight, Quantized)
    matrix, scales = weight if isinstance(weight, Quantized) else (weight, x)
    rows = matrix.shape[0] // 2 if silu else matrix.shape[0]
    out = x.new_empty(1, rows) if into is None else into
    tile = TILES[scaled, matrix.numel() > MIN_LARGE_ELEMENTS]
    block = min(tile.columns, next_power_of_2(columns))
    # With ``silu``, a program reads two matrices. With few rows, half a tile gives more programs.
    at_once = max(1, tile.elements // (2 if silu or rows <= 2048 else 1) // block)
    _project[(cdiv(rows, at_once),)](
        x, x if norm is None else norm, matrix, scales, x if bias is None else bias, out, rows, eps,
        COLUMNS=columns, NORM=norm is not None, BIAS=bias is not None, SILU=silu,
        ADD=into is not None, SCALED=scaled, ROWS=at_once, BLOCK=block, num_warps=tile.warps,
        **get_launch_options(x.device),
    )  # fmt: skip
    return out
