"""Overlap consecutive kernels by programmatic dependent launch, on Hopper and later GPUs.

A kernel starts once all programs of the previous kernel allow it. It may read constant data at
once. It must wait for the previous kernel before it reads other data, or writes any data.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER_CAPABILITY = (9, 0)


@cache
def get_launch_options(device: torch.device) -> dict[str, bool]:
    """Return launch options that let kernels overlap; empty if ``device`` does not support it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER_CAPABILITY:
        return {}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def allow_next_kernel(OVERLAP: tl.constexpr):
    """Allow the next kernel to start once all programs have called this function or ended."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def prefetch(start, BYTES: tl.constexpr):
    """Prefetch ``BYTES`` bytes from each address in ``start`` into the L2 cache.

    ``BYTES`` must be a multiple of 16.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [start, tl.full(start.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
