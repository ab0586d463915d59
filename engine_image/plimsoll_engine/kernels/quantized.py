"""Numbers of eight bits with a scale for each row: what they mean, in plain torch.

The format is e4m3 (OCP FP8): four bits of exponent, three of mantissa, up to 448. A row's largest
value becomes 448, so that a value differs from what was meant by a sixteenth of itself at most, or
by a thousandth of its scale where it is among the smallest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST = 1e-10
"""What counts as a row's largest value at least: a row of zeros has a scale, too."""


class Quantized(NamedTuple):
    """A matrix of weights: ``values`` e4m3 [out, in], ``scales`` float32 [out, 1]."""

    values: torch.Tensor
    scales: torch.Tensor


Weight = torch.Tensor | Quantized


def rows_of(weight: Weight, first: int, last: int | None) -> Weight:
    """Return rows ``first`` to ``last``, which is left out, of ``weight`` [out, in]: a view.

    None is the end.
    """
    if isinstance(weight, Quantized):
        return Quantized(weight.values[first:last], weight.scales[first:last])
    return weight[first:last]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` [..., size] as e4m3 of its shape, and the scales float32 [..., 1]."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    # By a number torch divides on CUDA as a product with its reciprocal, which may be off by a bit.
    scales = largest / largest.new_full((), FP8_MAX)
    return (wide / scales).to(FP8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what ``values`` [..., size] with ``scales`` [..., 1] mean, in float32."""
    return values.float() * scales


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` [rows, in] times ``weight`` [out, in], plus ``bias``; [rows, out] of its dtype.

    With a quantized weight each row of ``x`` is quantized as well, and the products are summed in
    float32.
    """
    if isinstance(weight, torch.Tensor):
        return _padded(x, weight, bias)
    wide = functional.linear(dequantize(*quantize(x)), dequantize(*weight))
    if bias is not None:
        wide += bias
    return wide.to(x.dtype)


def _padded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product, on a CPU of few different numbers of rows.

    For each number of rows of bfloat16 or float16, oneDNN compiles kernels and keeps them as long
    as the process lives: 0.25 MB (torch 2.11, AVX-512), and so gigabytes for the steps of a real
    model. With rows of zeros there are eight numbers between two powers of two.
    """
    if x.device.type != "cpu" or x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        return functional.linear(x, weight, bias)
    rows = len(x)
    more = -rows % (1 << max(0, (rows - 1).bit_length() - 4))
    return functional.linear(functional.pad(x, (0, 0, 0, more)), weight, bias)[:rows]
