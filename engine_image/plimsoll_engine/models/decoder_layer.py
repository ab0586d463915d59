"""Tensors of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plimsoll_engine.kernels.quantized import Weight


@dataclass(slots=True)
class Layer:
    """Tensors of one decoder layer, with the field names in :func:`make_parts`.

    If the layer has a ``router``, ``gate_up`` and ``down`` stack the matrices of all experts.
    """

    attention_norm: torch.Tensor
    qkv: Weight
    out: Weight
    mlp_norm: torch.Tensor
    gate_up: Weight
    down: Weight
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None

    @property
    def norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights [dim] of the query norm and the key norm; None if the layer has no such norms."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm
