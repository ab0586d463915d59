"""RMSNorm, fused with the preceding addition to the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import (
    cdiv,
    choose_rows_per_program,
    choose_warps,
    next_power_of_2,
)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, residual, weight, out, rows, size, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < size)
    offsets = row.to(tl.int64) * size + column
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + offsets, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / size + eps)[:, None]
    tl.store(out + offsets, (value * inverse * scale).to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the RMSNorm of ``x`` [rows, size] with the scale ``weight`` [size].

    If ``residual`` is given, ``x`` is added to it in place, and the sum is normalised instead.
    """
    rows, size = x.shape
    out = torch.empty_like(x)
    block = next_power_of_2(size)
    at_once = choose_rows_per_program(rows, block)
    _rms_norm[(cdiv(rows, at_once),)](
        x, x if residual is None else residual, weight, out, rows, size, eps,
        ADD=residual is not None, ROWS=at_once, BLOCK=block,
        num_warps=choose_warps(block * at_once), **get_launch_options(x.device),
    )  # fmt: skip
    return out
