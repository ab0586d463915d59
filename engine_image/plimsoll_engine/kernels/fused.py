"""The operations by Triton kernels, for CUDA. What they compute is said in ``interface``."""

from __future__ import annotations

import torch

from plimsoll_engine.kernels import activation, norm, rotary
from plimsoll_engine.kernels.decode_attention import decode_attention
from plimsoll_engine.kernels.prefill_attention import prefill_attention
from plimsoll_engine.models.interface import StepPlan


class FusedOps:
    """See :class:`plimsoll_engine.kernels.interface.Ops`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return norm.rms_norm(x, residual, weight, eps)

    def rotary(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return rotary.table(positions, inverse)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary_table: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        plan: StepPlan,
        layer: int,
    ) -> torch.Tensor:
        keys, values = plan.keys[layer], plan.values[layer]
        return rotary.rotate_and_store(
            qkv, rotary_table, norms, eps, plan.write_slots, keys, values
        )

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: StepPlan, layer: int) -> None:
        plan.keys[layer].index_copy_(0, plan.write_slots, key)
        plan.values[layer].index_copy_(0, plan.write_slots, value)

    def attend(
        self, query: torch.Tensor, plan: StepPlan, layer: int, scale: float, window: int | None
    ) -> torch.Tensor:
        keys, values = plan.keys[layer], plan.values[layer]
        out = torch.empty_like(query)
        if plan.decodes:
            decode_attention(
                query[: plan.decodes], keys, values, plan.tables, plan.contexts, plan.block_size,
                scale, window, out,
            )  # fmt: skip
        if plan.decodes < len(plan.contexts):
            prefill_attention(
                query, keys, values, plan.tables, plan.contexts, plan.starts, plan.decodes,
                plan.longest, plan.block_size, scale, window, out,
            )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)
