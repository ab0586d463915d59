"""Multiply a few rows by a matrix in decode steps, fused with the operations that follow.

This is memory-bound, so each program prefetches a part of its matrix before it waits for the
previous kernel. If several programs share a tile, the last one adds their sums in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    prefetch,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import MAX_FEW_ROWS, cdiv, pad_few_rows

# TMA reads at least 16 bytes.
MIN_TMA_ELEMENTS = 8
NUM_WARPS = 4
# Per product. Fewer programs do not saturate the memory of an H100.
MIN_PROGRAMS = 64
# A program with fewer inputs does not share its work.
MIN_SPLIT_INPUTS = 4096


class Tile(NamedTuple):
    """Tile of the result, and how programs compute it."""

    size: int  # Columns of the result.
    depth: int  # Inputs that a program reads at a time.
    stages: int  # Maximum number of reads in flight.
    parts: int = 1  # Programs that share the tile.
    ahead: int = 1024  # Bytes of each row that a program prefetches.


def choose_tile(size: int, columns: int, silu: bool, padded: int) -> Tile:
    """Return the tile for the product of ``padded`` rows and a matrix [``size``, ``columns``].

    The tiles were measured on an H200 and an H100, for the layers of a 0.6B and an 8B model
    (``bench/few_rows.py``).
    """
    if silu:
        return Tile(64, 128, 5, ahead=512)
    if size < 2048 and padded == MAX_FEW_ROWS:
        return Tile(16, 256, 6, parts=2)
    parts = max(1, MIN_PROGRAMS // cdiv(size, 64))
    if columns // parts >= MIN_SPLIT_INPUTS and size <= 64 * MIN_PROGRAMS:
        parts *= 2
    return Tile(64, 256, 4, parts)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, matrix, bias, out, sums, arrivals, rows, size, COLUMNS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, LENGTH: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    allow_next_kernel(OVERLAP)
    first = tl.program_id(0) * SIZE
    column = first + tl.arange(0, SIZE)
    inside = column < size
    part = tl.program_id(1)
    begin = part * LENGTH
    if OVERLAP:
        prefetch_start = matrix + tl.minimum(column, size - 1).to(tl.int64) * COLUMNS + begin
        prefetch(prefetch_start, AHEAD)
        if SILU:
            prefetch(prefetch_start + size.to(tl.int64) * COLUMNS, AHEAD)
    wait_for_previous_kernel(OVERLAP)
    # WGMMA instructions need at least 64 rows of the first operand.
    TRANSPOSED: tl.constexpr = SIZE >= 64
    SHAPE: tl.constexpr = (SIZE, ROWS) if TRANSPOSED else (ROWS, SIZE)
    total = tl.zeros(SHAPE, tl.float32)
    second = tl.zeros(SHAPE, tl.float32)
    for start in tl.range(begin, tl.minimum(begin + LENGTH, COLUMNS), DEPTH):
        inputs = x.load([0, start])
        weights = weight.load([first, start])
        if SILU:
            up = weight.load([size + first, start])
        if TRANSPOSED:
            total = tl.dot(weights, tl.trans(inputs), total)
            if SILU:
                second = tl.dot(up, tl.trans(inputs), second)
        else:
            total = tl.dot(inputs, tl.trans(weights), total)
            if SILU:
                second = tl.dot(inputs, tl.trans(up), second)
    result = tl.trans(total) if TRANSPOSED else total
    row = tl.arange(0, ROWS)[:, None]
    mask = (row < rows) & inside[None, :]
    offsets = row.to(tl.int64) * size + column[None, :]
    if PARTS > 1:
        of_part = ROWS * size.to(tl.int64)
        tl.store(sums + part * of_part + offsets, result, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") < PARTS - 1:
            return
        tl.store(arrivals + tl.program_id(0), 0)
        # Bypass the L1 cache, because other multiprocessors have written these sums.
        result = tl.load(sums + offsets, mask=mask, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, PARTS):
            pointers = sums + other * of_part + offsets
            result += tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    if BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        gated = tl.trans(second) if TRANSPOSED else second
        if BIAS:
            gated += tl.load(bias + size + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        result = result / (1.0 + tl.exp(-result)) * gated
    if ADD:
        result += tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


def supports(weight: torch.Tensor) -> bool:
    """Report whether :func:`multiply_few_rows` supports ``weight`` and its device."""
    aligned = weight.shape[1] % MIN_TMA_ELEMENTS == 0 and weight.is_contiguous()
    return weight.element_size() == 2 and aligned and bool(get_launch_options(weight.device))


def multiply_few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor,
    bias: torch.Tensor | None = None,
    silu: bool = False,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` as [rows, size], for up to :data:`MAX_FEW_ROWS` rows.

    ``x`` is [rows, columns], and ``weight`` [size, columns]. With ``silu``, the result is
    silu(first half) * second half of the product, [rows, size / 2]. If ``into`` is given, the
    result is added to it in place.

    ``arrivals`` are int32 zeros, at least one per shared tile, and are zero again afterwards.
    Products that share them must not run at the same time.
    """
    rows, columns = x.shape
    size = weight.shape[0] // 2 if silu else weight.shape[0]
    out = x.new_empty(rows, size) if into is None else into
    padded = pad_few_rows(rows)
    tile = choose_tile(size, columns, silu, padded)
    assert tile.parts == 1 or (not silu and cdiv(size, tile.size) <= len(arrivals))
    length = cdiv(cdiv(columns, tile.depth), tile.parts) * tile.depth
    parts = cdiv(columns, length)
    sums = x.new_empty(parts * padded * size, dtype=torch.float32) if parts > 1 else out
    ahead = min(tile.ahead, (columns - (parts - 1) * length) * x.element_size())
    _few_rows[(cdiv(size, tile.size), parts)](
        TensorDescriptor(x, [rows, columns], [columns, 1], [padded, tile.depth]),
        TensorDescriptor(weight, list(weight.shape), [columns, 1], [tile.size, tile.depth]),
        weight, x if bias is None else bias, out, sums, arrivals, rows, size, COLUMNS=columns,
        BIAS=bias is not None, SILU=silu, ADD=into is not None, ROWS=padded, SIZE=tile.size,
        DEPTH=tile.depth, PARTS=parts, LENGTH=length, AHEAD=ahead, num_warps=NUM_WARPS,
        num_stages=tile.stages, **get_launch_options(x.device),
    )  # fmt: skip
    return out
