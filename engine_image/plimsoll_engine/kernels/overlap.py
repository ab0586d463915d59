"""One kernel begins while the one ahead of it ends: programmatic dependent launch, from Hopper on.

Decoding one request is two hundred kernels of some microseconds each: what the device waits between
them counts. A kernel that is launched so runs as soon as all programs of the one ahead have begun.
It may read at once what never changes, the weights; then it waits until the kernel ahead has ended,
and only after that does it read what others wrote, or write anything.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched on ``device``: it overlaps where the device can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER:
        return {}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def let_next(OVERLAP: tl.constexpr):
    """Let the next kernel begin."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def after_last(OVERLAP: tl.constexpr):
    """Wait until the kernel ahead has ended and all that it wrote is seen."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def ask_for(start, BYTES: tl.constexpr):
    """Have the L2 cache read ``BYTES`` bytes from each address of ``start``, a multiple of 16."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [start, tl.full(start.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
