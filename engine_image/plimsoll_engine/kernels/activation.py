"""Activation of a gated MLP: silu(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of ``gate_up`` [rows, 2 * size] as [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(next_power_of_2(size), 2048)
    _silu_mul[(rows, cdiv(size, block))](
        gate_up, out, size, BLOCK=block, num_warps=4, **get_launch_options(gate_up.device)
    )
    return out
