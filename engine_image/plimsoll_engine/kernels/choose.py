"""Choose the implementation of the operations for a device."""

from __future__ import annotations

import torch

from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.reference import ReferenceOps


def choose_ops(device: torch.device) -> Ops:
    """Return Triton's operations on CUDA, and torch's elsewhere. Import Triton only on CUDA."""
    if device.type != "cuda":
        return ReferenceOps()
    from plimsoll_engine.kernels.fused import FusedOps

    return FusedOps()
