"""Gather rows of a tensor, and the token IDs of a step.

torch can do both, but loading its library modules would take 0.06 s at every restart.
"""

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


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["index"])
def _gather_rows(
    x, index, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    source = tl.load(index + row).to(tl.int64)
    value = tl.load(x + source * size + column, mask=column < size)
    tl.store(out + row * size + column, value, mask=column < size)


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``x`` [n, size] at ``index``, int32 or int64 [rows]."""
    size = x.shape[1]
    out = x.new_empty(len(index), size)
    block = min(2048, next_power_of_2(size))
    _gather_rows[(len(index), cdiv(size, block))](
        x, index, out, size, BLOCK=block, num_warps=4, **get_launch_options(x.device)
    )
    return out


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids", "sources"])
def _take_token_ids(
    ids, sources, newest, out, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    source = tl.load(sources + offsets, mask=mask, other=-1)
    given_ids = tl.load(ids + offsets, mask=mask, other=0).to(tl.int64)
    sampled = tl.load(newest + source, mask=source >= 0, other=0)
    sampled = tl.maximum(sampled, 0)  # -1 means that no token was sampled
    tl.store(out + offsets, tl.where(source >= 0, sampled, given_ids), mask=mask)


def take_token_ids(ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Return the input token IDs of a step, int64 [tokens]."""
    out = newest.new_empty(len(ids))
    _take_token_ids[(cdiv(len(ids), 256),)](
        ids, sources, newest, out, len(ids), BLOCK=256, **get_launch_options(ids.device)
    )
    return out
