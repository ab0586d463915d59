"""Choose the implementation of the decoder operations for a device."""

from __future__ import annotations

import torch

from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.reference import ReferenceOps


def choose_ops(device: torch.device) -> Ops:
    """Return the decoder operations in Triton for a CUDA device, or in torch for a CPU."""
    if device.type != "cuda":
        return ReferenceOps()
    from plimsoll_engine.kernels.fused import FusedOps

    return FusedOps()
