"""Decoder operations in plain torch, for CPUs and as a reference for all kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from plimsoll_engine.kernels import draw as by_noise
from plimsoll_engine.kernels import experts_reference
from plimsoll_engine.kernels.ops import KEY_LOWER_MASK
from plimsoll_engine.kernels.quantized import Weight, dequantize, product, quantize
from plimsoll_engine.kernels.step_plan import Pages, StepPlan


@dataclass(slots=True)
class Prefill:
    """Prompt chunk: the rows ``start:stop`` of a step, which are the last tokens of a sequence."""

    start: int
    stop: int
    slots: torch.Tensor  # int64 [context], of the whole sequence in the KV pool


@dataclass(slots=True)
class GatheredSlots:
    """Slots and masks of all contexts, computed once per step for all layers."""

    decode_slots: torch.Tensor  # int64 [decodes, longest context]
    prefills: list[Prefill]
    # By (index of the prefill or -1 for the decode rows, window).
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)


class ReferenceOps:
    """Implementation of :class:`Ops` in torch."""

    min_add_rows = 1024

    def get_max_projection_rows(self, weight: Weight) -> int:
        """Return 0, because :meth:`project` is never faster."""
        return 0

    def create_step_context(self, plan: StepPlan) -> AbstractContextManager[None]:
        return nullcontext()

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index.long()]

    def take_token_ids(
        self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(sources >= 0, newest[sources.clamp(min=0)].clamp(min=0), ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def compute_rotary_table(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        angles = positions.float().unsqueeze(-1) * inverse
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        plan: StepPlan,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv_heads, dim = plan.keys.shape[2:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        query, key, value = torch.split(
            qkv.view(len(qkv), -1, dim), [heads, kv_heads, kv_heads], dim=1
        )
        if norms is not None:
            query = self.rms_norm(query, norms[0], eps)
            key = self.rms_norm(key, norms[1], eps)
        self.store(rotate(key, rotary), value, plan, layer)
        rotated = rotate(query, rotary)
        return rotated if out is None else out.copy_(rotated)

    def normalize_and_rotate(
        self, query: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, eps: float,
        dim: int,
    ) -> torch.Tensor:  # fmt: skip
        query = query.view(len(query), -1, dim)
        return rotate(query if norm is None else self.rms_norm(query, norm, eps), rotary)

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: StepPlan, layer: int) -> None:
        for pages, rows in zip(plan.get_pages(layer), (key, value), strict=True):
            if pages.scales is None:
                pages.rows.index_copy_(0, plan.write_slots, rows)
            else:
                write_quantized(pages, plan.write_slots, *quantize(rows))

    def attend(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if plan.derived is None:
            plan.derived = gather_slots(plan)
        parts = []
        if plan.decodes:
            parts.append(_attend_decodes(query[: plan.decodes], plan, layer, scale, window))
        for prefill_index in range(len(plan.derived.prefills)):
            parts.append(_attend_prefill(query, plan, layer, prefill_index, scale, window))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended if out is None else out.copy_(attended)

    def add_attention(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        weight: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        self.add_product(self.attend(query, plan, layer, scale, window).flatten(1), weight, into)

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> None:
        into += product(x, weight, None)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return product(x, weight, bias)

    def project(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        silu: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = product(x if norm is None else self.rms_norm(x, norm, eps), weight, bias)
        if silu:
            out = self.silu_mul(out)
        if into is None:
            return out
        into += out
        return into

    def compute_experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        normalised: bool,
    ) -> torch.Tensor:
        return experts_reference.compute_experts(x, router, gate_up, down, top_k, normalised)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return by_noise.draw(logits, scales, keys)

    def compute_argmax_keys(self, x: torch.Tensor, first_column: int) -> torch.Tensor:
        value = torch.nan_to_num(x.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        highest, column = value.max(dim=-1)
        # Map the float to an integer of the same order. Adding 0.0 makes -0.0 equal to 0.0.
        bits = (highest + 0.0).view(torch.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return (ordered.long() << 32) | (KEY_LOWER_MASK - (first_column + column))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def gated_linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.silu_mul(self.linear(x, weight, bias))


def write_quantized(
    pages: Pages, slots: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write ``values`` e4m3 [tokens, heads, dim] and ``scales`` [tokens, heads, 1] to ``slots``."""
    assert pages.scales is not None
    # torch cannot index-copy 8-bit floats, so copy them as bytes.
    pages.rows.view(torch.uint8).index_copy_(0, slots, values.view(torch.uint8))
    page, place = _split_slots(pages.scales, slots)
    pages.scales[page, :, place] = scales.squeeze(-1)


def _read_rows(pages: Pages, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if pages.scales is None:
        return _gather_rows(pages.rows, slots)
    rows = _gather_rows(pages.rows.view(torch.uint8), slots).view(pages.rows.dtype)
    page, place = _split_slots(pages.scales, slots)
    return dequantize(rows, pages.scales[page, :, place].unsqueeze(-1)).to(dtype)


def _gather_rows(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    # Indexing would copy element by element, which takes several times as long on a CPU.
    return rows.index_select(0, slots.flatten()).view(*slots.shape, *rows.shape[1:])


def _split_slots(scales: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // scales.shape[-1], slots % scales.shape[-1]


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [tokens, heads, dim] with rotary position embedding, in the same dtype.

    ``rotary`` [tokens, dim] has the cosines, then the sines. Element i is rotated with element i +
    dim / 2, as in Llama's checkpoints.
    """
    cos, sin = rotary.unsqueeze(1).chunk(2, dim=-1)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def gather_slots(plan: StepPlan) -> GatheredSlots:
    """Return the slots that :meth:`ReferenceOps.attend` reads in every layer of the step."""
    contexts, starts = plan.contexts.tolist(), plan.starts.tolist()
    offsets = torch.arange(plan.block_size, device=plan.tables.device)
    slots = (plan.tables.long().unsqueeze(-1) * plan.block_size + offsets).flatten(1)
    widest = max(contexts[: plan.decodes], default=0)
    prefills = [
        Prefill(starts[row], starts[row + 1], slots[row, : contexts[row]])
        for row in range(plan.decodes, len(contexts))
    ]
    return GatheredSlots(slots[: plan.decodes, :widest], prefills)


def _get_mask(
    plan: StepPlan, prefill_index: int, newest: torch.Tensor, length: int, window: int | None
) -> torch.Tensor:
    # The mask is [rows, length], for rows at the positions ``newest`` [rows].
    masks = plan.derived.masks
    mask: torch.Tensor | None = masks.get((prefill_index, window))
    if mask is None:
        context, newest = torch.arange(length, device=newest.device), newest.unsqueeze(-1)
        mask = context <= newest
        if window is not None:
            mask &= context > newest - window
        masks[prefill_index, window] = mask
    return mask


def _attend_decodes(
    query: torch.Tensor, plan: StepPlan, layer: int, scale: float, window: int | None
) -> torch.Tensor:
    rows, heads, dim = query.shape
    slots = plan.derived.decode_slots
    keys, values = (_read_rows(pages, slots, query.dtype) for pages in plan.get_pages(layer))
    kv_heads = keys.shape[2]
    mask = _get_mask(plan, -1, plan.contexts[: plan.decodes] - 1, slots.shape[1], window)
    # Pass the query heads that share a kv head as its query rows, so that no key is copied.
    out = scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask[:, None, None, :],
        scale=scale,
    )
    return out.reshape(rows, heads, dim)


def _attend_prefill(
    query: torch.Tensor,
    plan: StepPlan,
    layer: int,
    prefill_index: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    prefill: Prefill = plan.derived.prefills[prefill_index]
    keys, values = (
        _read_rows(pages, prefill.slots, query.dtype) for pages in plan.get_pages(layer)
    )
    groups = query.shape[1] // keys.shape[1]
    length, new = len(prefill.slots), prefill.stop - prefill.start
    newest = torch.arange(length - new, length, device=query.device)
    out = scaled_dot_product_attention(
        query[prefill.start : prefill.stop].transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
        values.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
        attn_mask=_get_mask(plan, prefill_index, newest, length, window),
        scale=scale,
    )
    return out[0].transpose(0, 1)
