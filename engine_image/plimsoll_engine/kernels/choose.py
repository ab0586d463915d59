"""Which implementation of the operations a device gets."""

from __future__ import annotations

import torch

from plimsoll_engine.kernels.interface import Ops
from plimsoll_engine.kernels.reference import ReferenceOps


def ops_for(device: torch.device) -> Ops:
    """The backend of ``device``."""
    return ReferenceOps()
