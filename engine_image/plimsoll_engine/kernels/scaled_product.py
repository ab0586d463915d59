"""Multiply rows by a quantized matrix on CUDA.

``torch._scaled_mm`` supports only bfloat16 results, and sizes that are multiples of 16. The
reference implementation computes all other products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels import quantized
from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.quantized import FP8, Quantized
from plimsoll_engine.kernels.sizes import next_power_of_2

FP8_MAX = tl.constexpr(quantized.FP8_MAX)
MIN_ROW_MAXIMUM = tl.constexpr(quantized.MIN_ROW_MAXIMUM)
# torch._scaled_mm requires this for both dimensions.
WEIGHT_SIZE_MULTIPLE = 16


@triton.jit
def compute_row_scale(largest):
    """Return the scale of a row whose largest absolute value is ``largest``."""
    return tl.div_rn(tl.maximum(largest, MIN_ROW_MAXIMUM), FP8_MAX)


@triton.jit
def convert_to_fp8(x, scale):
    """Return ``x`` float32 divided by ``scale``, rounded to the nearest e4m3 value."""
    return tl.div_rn(x, scale).to(tl.float8e4nv)


@triton.jit
def _quantize(
    x, values, scales, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    scale = compute_row_scale(tl.max(tl.abs(value), axis=0))
    tl.store(values + row * size + column, convert_to_fp8(value, scale), mask=inside)
    tl.store(scales + row, scale)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` [rows, size] in e4m3, and its scales float32 [rows, 1]."""
    x = x.contiguous()
    rows, size = x.shape
    values = torch.empty(rows, size, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    _quantize[(rows,)](
        x, values, scales, size, BLOCK=block, num_warps=8 if block > 2048 else 4,
        **get_launch_options(x.device),
    )  # fmt: skip
    return values, scales


def scaled_product(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` as [rows, out] in the dtype of ``x``."""
    if x.dtype != torch.bfloat16 or any(
        size % WEIGHT_SIZE_MULTIPLE for size in weight.values.shape
    ):
        return quantized.product(x, weight, bias)
    values, scales = quantize(x)
    out: torch.Tensor = torch._scaled_mm(
        values, weight.values.t(), scale_a=scales, scale_b=weight.scales.t(), bias=bias,
        out_dtype=x.dtype, use_fast_accum=True,
    )  # fmt: skip
    return out
