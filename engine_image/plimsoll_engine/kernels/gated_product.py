"""Compute the gate and up projections of an MLP, fused with silu(gate) * up, for many rows.

A program computes the same tile of both projections, so they are not written to memory.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.sizes import cdiv

HOPPER_MAJOR = 9
# TMA reads at least 16 bytes.
MIN_TMA_ELEMENTS = 8
# Size of a tile of each projection, and number of input columns that are read at a time.
TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 128, 128, 64
# Number of rows of tiles that are computed at about the same time. Concurrent programs then read
# the least data: about 16 tiles of inputs, and 8 tiles of weights, which are twice as large.
TILE_ROWS_PER_GROUP = 16
NUM_WARPS, NUM_STAGES = 8, 3
# All tiles take equally long, and the last tiles may leave multiprocessors idle. cuBLAS can choose
# other tile sizes. On an H100 (bench/gated_product.py), this kernel was 1 to 12 % faster in the 14
# cases above both limits, and 2 to 39 % slower in the other ten.
MIN_TILES_PER_PROCESSOR, MIN_BUSY_SHARE = 2, 0.95


@triton.jit(do_not_specialize=["rows"])
def _gated_product(
    x, weight, out, rows, size, columns, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_rows, tile_columns = tl.cdiv(rows, ROWS), tl.cdiv(size, COLUMNS)
    for tile in tl.range(tl.program_id(0), tile_rows * tile_columns, PROGRAMS):
        first = tile // (GROUP * tile_columns) * GROUP
        height = tl.minimum(tile_rows - first, GROUP)
        inner = tile % (GROUP * tile_columns)
        row = (first + inner % height) * ROWS
        column = inner // height * COLUMNS
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in tl.range(0, tl.cdiv(columns, DEPTH)):
            inputs = x.load([row, part * DEPTH])
            gate_weight = weight.load([column, part * DEPTH])
            up_weight = weight.load([size + column, part * DEPTH])
            gate = tl.dot(inputs, tl.trans(gate_weight), gate)
            up = tl.dot(inputs, tl.trans(up_weight), up)
        result = gate / (1.0 + tl.exp(-gate)) * up
        out.store([row, column], result.to(out.dtype))


@cache
def _count_multiprocessors(device: torch.device) -> int:
    # 0 if ``device`` cannot run the kernel.
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER_MAJOR:
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def supports(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> bool:
    """Report whether :func:`gated_product` supports these arguments."""
    if not isinstance(weight, torch.Tensor) or bias is not None or x.element_size() != 2:
        return False
    aligned = (
        x.shape[1] % MIN_TMA_ELEMENTS == 0
        and weight.shape[0] % (2 * MIN_TMA_ELEMENTS) == 0
        and x.is_contiguous()
    )
    return aligned and _count_multiprocessors(x.device) > 0


def count_tiles(num_rows: int, num_columns: int) -> int:
    """Return the number of tiles of a result [``num_rows``, ``num_columns``]."""
    return cdiv(num_rows, TILE_ROWS) * cdiv(num_columns, TILE_COLUMNS)


def is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Report whether :func:`gated_product` is faster than separate kernels for these arguments."""
    processors = _count_multiprocessors(x.device)
    tiles = count_tiles(x.shape[0], weight.shape[0] // 2)
    full = tiles >= MIN_BUSY_SHARE * cdiv(tiles, processors) * processors
    return full and tiles > MIN_TILES_PER_PROCESSOR * processors


# Devices, dtypes and weight shapes for which this process has loaded the kernel.
_loaded_kernels: set[tuple[object, ...]] = set()


def load_kernel(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Load the kernel for this dtype and weight shape, so that no request waits for it later."""
    if (x.device, x.dtype, weight.shape) not in _loaded_kernels:
        gated_product(x[:1], weight)


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as [rows, size], for the projections of ``x`` [rows, columns].

    ``weight`` [2 * size, columns] is the gate projection, then the up projection. All tensors must
    be contiguous and have the same dtype.
    """
    _loaded_kernels.add((x.device, x.dtype, weight.shape))
    rows, columns = x.shape
    size = weight.shape[0] // 2
    out = x.new_empty(rows, size)
    programs = _count_multiprocessors(x.device)
    _gated_product[(min(programs, count_tiles(rows, size)),)](
        TensorDescriptor(x, [rows, columns], [columns, 1], [TILE_ROWS, TILE_DEPTH]),
        TensorDescriptor(weight, [2 * size, columns], [columns, 1], [TILE_COLUMNS, TILE_DEPTH]),
        TensorDescriptor(out, [rows, size], [size, 1], [TILE_ROWS, TILE_COLUMNS]),
        rows, size, columns, PROGRAMS=programs, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        DEPTH=TILE_DEPTH, GROUP=TILE_ROWS_PER_GROUP, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
