"""Which implementation of the operations a device gets."""

from __future__ import annotations

import torch

from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.reference import ReferenceOps


def ops_for(device: torch.device) -> Ops:
    """Triton's on CUDA, torch's elsewhere: Triton is imported only where there is a CUDA device."""
    if device.type != "cuda":
        return ReferenceOps()
    from plimsoll_engine.kernels.fused import FusedOps

    return FusedOps()
