"""The operations by Triton kernels, for CUDA. What they compute is said in ``interface``."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from plimsoll_engine.kernels import activation, norm, rotary
from plimsoll_engine.kernels import rows as by_row
from plimsoll_engine.kernels.decode_attention import decode_attention
from plimsoll_engine.kernels.prefill_attention import prefill_attention
from plimsoll_engine.kernels.project import project
from plimsoll_engine.models.interface import StepPlan

LIBRARY_ROWS = 1024
"""From so many rows on a whole prompt, which needs no part of the pool, is the library's: 530 to
580 TFLOP/s on an H200 at 4096 rows and 128 dimensions, where ours has 307 (bench/kernels.py)."""
LIBRARY_STEP = 256
"""Such prompts are padded to a multiple: the library keeps a plan for each length that it meets."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _padded(whole: list[int], tokens: int, device: torch.device) -> list[torch.Tensor]:
    """The rows of each whole prompt, the last ones of a step of ``tokens``; behind them, as
    padding, the last row again: no row before it attends to that."""
    found = []
    first = tokens - sum(whole)
    for rows in whole:
        size = -(-rows // LIBRARY_STEP) * LIBRARY_STEP
        found.append(torch.arange(size, device=device).clamp_(max=rows - 1) + first)
        first += rows
    return found


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention within one sequence; [rows, heads, dim] each."""
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
    return out[0].transpose(0, 1)


class FusedOps:
    """See :class:`plimsoll_engine.kernels.interface.Ops`."""

    projects = True

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return by_row.rows(x, index)

    def take(self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        return by_row.take(ids, sources, newest)

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
        whole = [rows for rows in plan.fresh if rows >= LIBRARY_ROWS] if window is None else []
        end = len(plan.contexts) - len(whole)
        if plan.decodes < end:
            prefill_attention(
                query, keys, values, plan.tables, plan.contexts[:end], plan.starts, plan.decodes,
                plan.longest, plan.block_size, scale, window, out,
            )  # fmt: skip
        if whole and plan.derived is None:
            plan.derived = _padded(whole, len(query), query.device)
        first = len(query) - sum(whole)
        for at, rows in zip(plan.derived or (), whole, strict=True):
            slots = plan.write_slots[at]
            found = _causal(query[at], keys[slots], values[slots], scale)
            out[first : first + rows] = found[:rows]
            first += rows
        return out

    def project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        silu: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return project(x, weight, bias, norm, eps, silu, into)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)
