"""Choice between the implementations of the operations."""

from __future__ import annotations

import torch

from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.reference import ReferenceOps


def ops_for(device: torch.device) -> Ops:
    """Return Triton's operations on CUDA and torch's elsewhere. Imports Triton only for CUDA."""
    if device.type != "cuda":
        return ReferenceOps()
    from plimsoll_engine.kernels.fused import FusedOps

    return FusedOps()
