"""The first product of an MLP and its activation, silu(gate) x up, in one kernel for many rows.

The gate and up projections have twice the columns of what the activation makes of them. Here they
never reach memory: a program computes the same tile of both, from the same rows. The tensor memory
accelerator (TMA) of Hopper reads and writes the tiles.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from plimsoll_engine.kernels.quantized import Weight
from plimsoll_engine.kernels.sizes import cdiv

HOPPER = 9
LINE = 8
"""So many elements of 16 bits are a line of 16 bytes, as TMA reads them."""
ROWS, COLUMNS, DEPTH = 128, 128, 64
"""Of a tile of either projection, and how many of the inputs' columns are read at a time."""
GROUP = 16
"""So many tiles below each other are computed at a time. Each processor has one program. Those that
run together then read the fewest rows: some 16 tiles of inputs, and 8 of weights, which are twice
as large."""
WARPS, STAGES = 8, 3
ROUNDS, FULL = 2, 0.95
"""It is computed here with more tiles than so many for each processor, if all of them have work for
this share of the time: tiles take equally long, and the last ones may be too few for all. The
library has tiles of other sizes to choose from. By times on an H100
(``research/bench/gated_product.py``): faster by 1 to 12 % in the 14 cases beyond both bounds,
slower by 2 to 39 % in the other ten."""


@triton.jit(do_not_specialize=["rows"])
def _gated_product(
    x, weight, out, rows, size, columns, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    below, beside = tl.cdiv(rows, ROWS), tl.cdiv(size, COLUMNS)
    for tile in tl.range(tl.program_id(0), below * beside, PROGRAMS):
        first = tile // (GROUP * beside) * GROUP
        height = tl.minimum(below - first, GROUP)
        inner = tile % (GROUP * beside)
        row = (first + inner % height) * ROWS
        column = inner // height * COLUMNS
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in tl.range(0, tl.cdiv(columns, DEPTH)):
            given = x.load([row, part * DEPTH])
            gate_weight = weight.load([column, part * DEPTH])
            up_weight = weight.load([size + column, part * DEPTH])
            gate = tl.dot(given, tl.trans(gate_weight), gate)
            up = tl.dot(given, tl.trans(up_weight), up)
        result = gate / (1.0 + tl.exp(-gate)) * up
        out.store([row, column], result.to(out.dtype))


@cache
def _processors(device: torch.device) -> int:
    """Return how many programs run at a time on ``device``; 0 where the kernel is not for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def fits(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> bool:
    """Whether :func:`gated_product` can compute this."""
    if not isinstance(weight, torch.Tensor) or bias is not None or x.element_size() != 2:
        return False
    aligned = x.shape[1] % LINE == 0 and weight.shape[0] % (2 * LINE) == 0 and x.is_contiguous()
    return aligned and _processors(x.device) > 0


def tiles_of(rows: int, size: int) -> int:
    """Return how many tiles the result [rows, size] has."""
    return cdiv(rows, ROWS) * cdiv(size, COLUMNS)


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`gated_product` is faster than its parts."""
    processors = _processors(x.device)
    tiles = tiles_of(x.shape[0], weight.shape[0] // 2)
    full = tiles >= FULL * cdiv(tiles, processors) * processors
    return full and tiles > ROUNDS * processors


_loaded: set[tuple[object, ...]] = set()
"""The kinds of products whose kernel this process has loaded."""


def load(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Load the kernel for more rows of this kind, once: no later request is to wait for it."""
    if (x.device, x.dtype, weight.shape) not in _loaded:
        gated_product(x[:1], weight)


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) x up, [rows, size], of the product of ``x`` [rows, columns].

    ``weight`` [2 * size, columns] has the rows of the gate projection, then those of the up
    projection. All are contiguous and of one dtype. Sums and activation are in float32.
    """
    _loaded.add((x.device, x.dtype, weight.shape))
    rows, columns = x.shape
    size = weight.shape[0] // 2
    out = x.new_empty(rows, size)
    programs = _processors(x.device)
    _gated_product[(min(programs, tiles_of(rows, size)),)](
        TensorDescriptor(x, [rows, columns], [columns, 1], [ROWS, DEPTH]),
        TensorDescriptor(weight, [2 * size, columns], [columns, 1], [COLUMNS, DEPTH]),
        TensorDescriptor(out, [rows, size], [size, 1], [ROWS, COLUMNS]),
        rows, size, columns, PROGRAMS=programs, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
        GROUP=GROUP, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
