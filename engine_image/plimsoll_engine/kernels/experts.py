"""Compute a mixture of experts as grouped matrix products, with one launch for all experts.

A program computes one tile of an expert's product: a block of the expert's (row, expert) pairs by a
block of columns. The results of a row's experts are summed in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.quantized import Quantized, Weight
from plimsoll_engine.kernels.routing import Routes, route
from plimsoll_engine.kernels.scaled_product import quantize
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2


class Tile(NamedTuple):
    """Tile sizes and launch options of the grouped products."""

    rows: int  # pairs of a program
    columns: int  # results of a program for each pair
    depth: int  # inputs that a program reads at a time
    sort: int  # pairs that the sort by expert processes at a time
    warps: int
    stages: int


FEW_PAIRS_TILE = Tile(rows=16, columns=64, depth=128, sort=1024, warps=4, stages=4)
MEDIUM_PAIRS_TILE = Tile(rows=64, columns=128, depth=64, sort=1024, warps=4, stages=4)
MANY_PAIRS_TILE = Tile(rows=128, columns=128, depth=64, sort=4096, warps=8, stages=3)
# Maximum mean number of pairs per expert for FEW_PAIRS_TILE and MEDIUM_PAIRS_TILE. These values
# come from the specifications of an H200, not from measurements. With fewer than about 150 rows per
# expert, reading the weights takes longer than the arithmetic. Each weight should then be read only
# once.
MAX_FEW_PAIRS_PER_EXPERT, MAX_MEDIUM_PAIRS_PER_EXPERT = 8, 96
FLOAT32_FEW_PAIRS_TILE = Tile(rows=16, columns=32, depth=32, sort=1024, warps=4, stages=2)
# For float32, which is multiplied with full precision and without tensor cores.
FLOAT32_MANY_PAIRS_TILE = Tile(rows=32, columns=32, depth=32, sort=1024, warps=4, stages=2)


def list_tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return all tiles that :func:`choose_tile` may return for ``dtype``."""
    return (
        (FLOAT32_FEW_PAIRS_TILE, FLOAT32_MANY_PAIRS_TILE)
        if dtype == torch.float32
        else (FEW_PAIRS_TILE, MEDIUM_PAIRS_TILE, MANY_PAIRS_TILE)
    )


def choose_tile(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """Return the tile for ``num_pairs`` pairs (row, expert) of a layer."""
    if dtype == torch.float32:
        return (
            FLOAT32_FEW_PAIRS_TILE
            if num_pairs <= MAX_FEW_PAIRS_PER_EXPERT * num_experts
            else FLOAT32_MANY_PAIRS_TILE
        )
    if num_pairs <= MAX_FEW_PAIRS_PER_EXPERT * num_experts:
        return FEW_PAIRS_TILE
    return (
        MEDIUM_PAIRS_TILE
        if num_pairs <= MAX_MEDIUM_PAIRS_PER_EXPERT * num_experts
        else MANY_PAIRS_TILE
    )


@triton.jit(do_not_specialize=["pairs"])
def _compute_gate_up(
    x, row_scales, weight, scales, order, owners, out, pairs,
    CHOSEN: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    across = tl.cdiv(WIDTH, COLUMNS)
    block = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    row_mask = (pair < pairs)[:, None]
    weight_mask = (column < WIDTH)[:, None]
    rows = x + (pair // CHOSEN).to(tl.int64)[:, None] * HIDDEN
    gates = weight + (expert * 2 * WIDTH + column)[:, None] * HIDDEN
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        inner = start + tl.arange(0, DEPTH)[None, :]
        if HIDDEN % DEPTH == 0:
            row = tl.load(rows + inner, mask=row_mask, other=0.0)
            first = tl.load(gates + inner, mask=weight_mask, other=0.0)
            second = tl.load(gates + WIDTH * HIDDEN + inner, mask=weight_mask, other=0.0)
        else:
            inside = inner < HIDDEN
            row = tl.load(rows + inner, mask=row_mask & inside, other=0.0)
            first = tl.load(gates + inner, mask=weight_mask & inside, other=0.0)
            second = tl.load(gates + WIDTH * HIDDEN + inner, mask=weight_mask & inside, other=0.0)
        gate = tl.dot(row, tl.trans(first), gate, input_precision=PRECISION)
        up = tl.dot(row, tl.trans(second), up, input_precision=PRECISION)
    if SCALED:
        row_scale = tl.load(row_scales + pair // CHOSEN, mask=pair < pairs, other=0.0)[:, None]
        of_gates = scales + expert * 2 * WIDTH + column
        gate *= row_scale * tl.load(of_gates, mask=column < WIDTH, other=0.0)[None, :]
        up *= row_scale * tl.load(of_gates + WIDTH, mask=column < WIDTH, other=0.0)[None, :]
    result = gate / (1.0 + tl.exp(-gate)) * up
    offsets = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = row_mask & (column < WIDTH)[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def _compute_down(
    x, row_scales, weight, scales, order, owners, shares, out, pairs,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    across = tl.cdiv(HIDDEN, COLUMNS)
    block = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    row_mask = (pair < pairs)[:, None]
    weight_mask = (column < HIDDEN)[:, None]
    rows = x + pair.to(tl.int64)[:, None] * WIDTH
    downs = weight + (expert * HIDDEN + column)[:, None] * WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        inner = start + tl.arange(0, DEPTH)[None, :]
        if WIDTH % DEPTH == 0:
            row = tl.load(rows + inner, mask=row_mask, other=0.0)
            part = tl.load(downs + inner, mask=weight_mask, other=0.0)
        else:
            inside = inner < WIDTH
            row = tl.load(rows + inner, mask=row_mask & inside, other=0.0)
            part = tl.load(downs + inner, mask=weight_mask & inside, other=0.0)
        total = tl.dot(row, tl.trans(part), total, input_precision=PRECISION)
    if SCALED:
        column_scale = tl.load(scales + expert * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        total *= column_scale[None, :]
        total *= tl.load(row_scales + pair, mask=pair < pairs, other=0.0)[:, None]
    share = tl.load(shares + pair, mask=pair < pairs, other=0.0).to(tl.float32)
    offsets = pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    mask = row_mask & (column < HIDDEN)[None, :]
    tl.store(out + offsets, (total * share[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_experts(
    parts, out, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    for number in tl.static_range(0, CHOSEN):
        offsets = (row * CHOSEN + number) * HIDDEN + column
        total += tl.load(parts + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=mask)


def _quantize_rows(rows: torch.Tensor, weight: Weight) -> tuple[tuple[torch.Tensor, ...], bool]:
    # The scales of an unquantized matrix are placeholders that the kernels do not read.
    if isinstance(weight, Quantized):
        return (*quantize(rows), *weight), True
    return (rows, rows, weight, weight), False


def _count_columns(weight: Weight) -> int:
    matrix = weight.values if isinstance(weight, Quantized) else weight
    return matrix.shape[1]


def _compute_products(
    x: torch.Tensor, gate_up: Weight, down: Weight, routes: Routes, tile: Tile
) -> torch.Tensor:
    tokens, hidden = x.shape
    width = _count_columns(down)
    top_k = routes.shares.shape[1]
    pairs, blocks = tokens * top_k, len(routes.owners)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    launch = get_launch_options(x.device)
    inner = x.new_empty(pairs, width)
    half = tile.columns // 2  # a program computes both gate and up of its columns
    factors, scaled = _quantize_rows(x, gate_up)
    _compute_gate_up[(blocks * cdiv(width, half),)](
        *factors, routes.order, routes.owners, inner, pairs,
        CHOSEN=top_k, HIDDEN=hidden, WIDTH=width, SCALED=scaled, ROWS=tile.rows, COLUMNS=half,
        DEPTH=tile.depth, PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
        **launch,
    )  # fmt: skip
    parts = x.new_empty(pairs, hidden)
    factors, scaled = _quantize_rows(inner, down)
    _compute_down[(blocks * cdiv(hidden, tile.columns),)](
        *factors, routes.order, routes.owners, routes.shares, parts, pairs,
        HIDDEN=hidden, WIDTH=width, SCALED=scaled, ROWS=tile.rows, COLUMNS=tile.columns,
        DEPTH=tile.depth, PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
        **launch,
    )  # fmt: skip
    out = torch.empty_like(x)
    block = min(1024, next_power_of_2(hidden))
    _sum_experts[(tokens, cdiv(hidden, block))](
        parts, out, HIDDEN=hidden, CHOSEN=top_k, BLOCK=block, num_warps=4, **launch
    )
    return out


# Devices, shapes, dtypes and options for which this process has loaded all kernels.
_loaded_kernels: set[tuple[object, ...]] = set()


def compute_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    top_k: int,
    normalised: bool,
) -> torch.Tensor:
    """Return the weighted sum of each row's ``top_k`` best experts, as [tokens, hidden].

    The first call for a shape also loads the kernels of all tiles.
    """
    logits = linear(x, router)
    formats = [isinstance(weight, Quantized) for weight in (gate_up, down)]
    shape = (x.device, x.dtype, router.shape, _count_columns(down), *formats, top_k, normalised)
    if shape not in _loaded_kernels:
        _loaded_kernels.add(shape)
        for tile in list_tiles(x.dtype):
            routes = route(logits[:1], top_k, normalised, tile.rows, tile.sort)
            _compute_products(x[:1], gate_up, down, routes, tile)
    tile = choose_tile(len(x) * top_k, len(router), x.dtype)
    routes = route(logits, top_k, normalised, tile.rows, tile.sort)
    return _compute_products(x, gate_up, down, routes, tile)
