"""Quantize to 8-bit floats with one scale per row, in plain torch.

The format is e4m3 (OCP FP8), with a maximum of 448. A row is scaled so that its largest absolute
value becomes 448.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# A row of zeros then has a valid scale.
MIN_ROW_MAXIMUM = 1e-10


class Quantized(NamedTuple):
    """Quantized weight matrix: ``values`` e4m3 [out, in] and ``scales`` float32 [out, 1]."""

    values: torch.Tensor
    scales: torch.Tensor


Weight = torch.Tensor | Quantized


def slice_rows(weight: Weight, first: int, last: int | None) -> Weight:
    """Return a view of the rows ``first:last`` of ``weight`` [out, in]."""
    if isinstance(weight, Quantized):
        return Quantized(weight.values[first:last], weight.scales[first:last])
    return weight[first:last]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` [..., size] in e4m3, and its scales float32 [..., 1]."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=MIN_ROW_MAXIMUM)
    # On CUDA, torch divides by a Python number by multiplying with its reciprocal, which can round
    # differently.
    scales = largest / largest.new_full((), FP8_MAX)
    return (wide / scales).to(FP8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [..., size] times ``scales`` [..., 1], in float32."""
    return values.float() * scales


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` as [rows, out] in the dtype of ``x``.

    ``x`` is [rows, in], and ``weight`` [out, in]. If ``weight`` is quantized, the rows of ``x`` are
    quantized as well.
    """
    if isinstance(weight, torch.Tensor):
        return _multiply_padded(x, weight, bias)
    wide = functional.linear(dequantize(*quantize(x)), dequantize(*weight))
    if bias is not None:
        wide += bias
    return wide.to(x.dtype)


def _multiply_padded(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # oneDNN compiles kernels of 0.25 MB for each number of bfloat16 or float16 rows, and never
    # frees them (torch 2.11, AVX-512). For a real model, they would add up to gigabytes. With
    # padding, there are only eight numbers of rows between two powers of two.
    if x.device.type != "cpu" or x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        return functional.linear(x, weight, bias)
    rows = len(x)
    padding = -rows % (1 << max(0, (rows - 1).bit_length() - 4))
    return functional.linear(functional.pad(x, (0, 0, 0, padding)), weight, bias)[:rows]
