"""Attention over the paged KV pool, registered with transformers under :data:`NAME`.

A step's rows are flattened into one sequence of tokens, shape [1, tokens]: first the decode rows
(one token each), then the prefill chunks. Each layer writes its new keys and values to their slots
in the pool and reads every request's context back by its block table. The plan of a step travels
as a keyword argument through the model's forward, so no module and no global holds the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "plimsoll_paged"


@dataclass(slots=True)
class Prefill:
    """Rows ``start`` to ``stop`` of a step are a chunk of one request; they attend to ``slots``,
    its context with the chunk itself at the end. ``mask`` is [rows, context], true where allowed.
    """

    start: int
    stop: int
    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class StepPlan:
    """Where a step reads and writes the pool, the same for every layer.

    ``keys`` and ``values`` are [layers, slots, kv heads, head dimension]. The first ``decodes``
    rows attend to ``decode_slots`` [decodes, longest context], where ``decode_mask`` is true.
    """

    keys: torch.Tensor
    values: torch.Tensor
    write_slots: torch.Tensor
    decodes: int
    decode_slots: torch.Tensor
    decode_mask: torch.Tensor
    prefills: list[Prefill]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    plan: StepPlan,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer; tensors are [1, heads, tokens, head dimension], as transformers
    hands them, and the result is [1, tokens, heads, head dimension]."""
    if getattr(module, "sliding_window", None) is not None:
        raise NotImplementedError("sliding window attention is not supported by the paged KV pool")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = plan.keys[layer], plan.values[layer]
    keys.index_copy_(0, plan.write_slots, key[0].transpose(0, 1))
    values.index_copy_(0, plan.write_slots, value[0].transpose(0, 1))
    parts = []
    if plan.decodes:
        parts.append(_decode(query[0, :, : plan.decodes], keys, values, plan, scaling))
    parts += [
        _prefill(query[:, :, prefill.start : prefill.stop], keys, values, prefill, scaling)
        for prefill in plan.prefills
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: StepPlan, scaling: float
) -> torch.Tensor:
    heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    # The query heads that share a kv head become query rows of it: no key is copied per head.
    grouped = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(
        grouped,
        keys[plan.decode_slots].transpose(1, 2),
        values[plan.decode_slots].transpose(1, 2),
        attn_mask=plan.decode_mask[:, None, None, :],
        scale=scaling,
    )
    return out.reshape(rows, heads, dim)


def _prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefill: Prefill, scaling: float
) -> torch.Tensor:
    groups = query.shape[1] // keys.shape[1]
    out = scaled_dot_product_attention(
        query,
        keys[prefill.slots].transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
        values[prefill.slots].transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
        attn_mask=prefill.mask,
        scale=scaling,
    )
    return out[0].transpose(0, 1)


def register() -> None:
    """Make :data:`NAME` known to transformers; again does nothing more."""
    AttentionInterface.register(NAME, paged_attention)
