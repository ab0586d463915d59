"""Product of a matrix and a few rows for decode steps, fused with what follows it in a layer.

It is memory-bound: it reads the whole matrix for a few operations an element. Each program
prefetches the first part of its matrix before it waits for the previous kernel, so that memory is
never idle between kernels. Hopper's tensor memory accelerator (TMA) reads the rest. The matrix must
have 16-bit elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    overlap,
    prefetch,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import FEW_ROWS, cdiv, few_padded

LINE = 8
"""Number of 16-bit elements in the 16 bytes that TMA reads at least."""
AHEAD = 1024
"""Bytes of each row of the matrix that a program prefetches."""
WARPS = 4


class Tile(NamedTuple):
    """Tile of one program: ``size`` columns of the result, from ``depth`` inputs at a time.

    ``stages`` tiles of inputs are loaded ahead.
    """

    size: int
    depth: int
    stages: int


def tile_for(size: int, silu: bool, padded: int) -> Tile:
    """Return the tile for a product of ``size`` columns.

    Measured on an H100 in the layers of a 0.6B and an 8B model. Small products need many programs.
    If a multiprocessor runs only one or two programs, these must read far ahead.
    """
    if silu:
        return Tile(64, 128, 4)
    if size < 2048:
        return Tile(16, 256, 6)
    if size > 4096:
        return Tile(64, 256, 3)
    return Tile(64, 256, 5) if padded < FEW_ROWS else Tile(64, 128, 7)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, matrix, bias, out, rows, size, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    DEPTH: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    allow_next_kernel(OVERLAP)
    first = tl.program_id(0) * SIZE
    column = first + tl.arange(0, SIZE)
    inside = column < size
    if OVERLAP:
        mine = matrix + tl.minimum(column, size - 1).to(tl.int64) * COLUMNS
        prefetch(mine, AHEAD)
        if SILU:
            prefetch(mine + size.to(tl.int64) * COLUMNS, AHEAD)
    wait_for_previous_kernel(OVERLAP)
    # WGMMA instructions need at least 64 rows of the first operand.
    TURNED: tl.constexpr = SIZE >= 64
    SHAPE: tl.constexpr = (SIZE, ROWS) if TURNED else (ROWS, SIZE)
    total = tl.zeros(SHAPE, tl.float32)
    second = tl.zeros(SHAPE, tl.float32)
    for start in tl.range(0, COLUMNS, DEPTH):
        given = x.load([0, start])
        own = weight.load([first, start])
        if SILU:
            up = weight.load([size + first, start])
        if TURNED:
            total = tl.dot(own, tl.trans(given), total)
            if SILU:
                second = tl.dot(up, tl.trans(given), second)
        else:
            total = tl.dot(given, tl.trans(own), total)
            if SILU:
                second = tl.dot(given, tl.trans(up), second)
    result = tl.trans(total) if TURNED else total
    if BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        gated = tl.trans(second) if TURNED else second
        if BIAS:
            gated += tl.load(bias + size + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        result = result / (1.0 + tl.exp(-result)) * gated
    row = tl.arange(0, ROWS)[:, None]
    at = out + row.to(tl.int64) * size + column[None, :]
    there = (row < rows) & inside[None, :]
    if ADD:
        result += tl.load(at, mask=there, other=0.0).to(tl.float32)
    tl.store(at, result.to(out.dtype.element_ty), mask=there)


def fits(weight: torch.Tensor) -> bool:
    """Report whether :func:`few_rows` can multiply with ``weight``."""
    aligned = weight.shape[1] % LINE == 0 and weight.is_contiguous()
    return weight.element_size() == 2 and aligned and bool(overlap(weight.device))


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    silu: bool = False,
    into: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return ``x`` [rows, columns] times ``weight`` [size, columns] as [rows, size].

    ``rows`` is at most ``FEW_ROWS``. With ``silu`` the first half of the product's columns gates
    the second; the result is [rows, size / 2]. If ``into`` is given, the result is added to it in
    place. Sums are in float32. Memory-bound by ``weight``.
    """
    rows, columns = x.shape
    size = weight.shape[0] // 2 if silu else weight.shape[0]
    out = x.new_empty(rows, size) if into is None else into
    padded = few_padded(rows)
    tile = tile or tile_for(size, silu, padded)
    _few_rows[(cdiv(size, tile.size),)](
        TensorDescriptor(x, [rows, columns], [columns, 1], [padded, tile.depth]),
        TensorDescriptor(weight, list(weight.shape), [columns, 1], [tile.size, tile.depth]),
        weight, x if bias is None else bias, out, rows, size, COLUMNS=columns,
        BIAS=bias is not None, SILU=silu, ADD=into is not None, ROWS=padded, SIZE=tile.size,
        DEPTH=tile.depth, AHEAD=min(AHEAD, columns * x.element_size()), num_warps=WARPS,
        num_stages=tile.stages, **overlap(x.device),
    )  # fmt: skip
    return out
