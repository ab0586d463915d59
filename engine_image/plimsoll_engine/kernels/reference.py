"""The operations in plain torch: what a CPU runs, and what every kernel is compared with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from plimsoll_engine.kernels import draw as by_noise
from plimsoll_engine.kernels import experts_reference
from plimsoll_engine.kernels.ops import KEY_LOWER
from plimsoll_engine.kernels.quantized import Weight, dequantize, product, quantize
from plimsoll_engine.kernels.step_plan import Pages, StepPlan


@dataclass(slots=True)
class Prefill:
    """Rows ``start`` to ``stop`` of a step are the newest tokens of a context at ``slots``."""

    start: int
    stop: int
    slots: torch.Tensor


@dataclass(slots=True)
class Gather:
    """The slots of every context, and who may see which, once a step for all layers."""

    decode_slots: torch.Tensor
    prefills: list[Prefill]
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)


class ReferenceOps:
    """See :class:`plimsoll_engine.kernels.ops.Ops`."""

    adds_from = 1024

    def projects(self, weight: Weight) -> int:
        """Return 0: nothing is faster than its parts."""
        return 0

    def computing(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows ``index`` int [tokens] of ``x`` [rows, columns]: [tokens, columns]."""
        return x[index.long()]

    def take(self, ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Return ``ids`` [rows], with ``newest[sources]`` where ``sources`` is not negative.

        The result is int64 [rows], as ``newest`` is.
        """
        return torch.where(sources >= 0, newest[sources.clamp(min=0)].clamp(min=0), ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x`` [rows, columns] normalised in float32 and scaled by ``weight`` [columns].

        The result has the dtype of ``x``.
        """
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` [rows, columns] in place and normalise the sum.

        The result is [rows, columns] of the dtype of ``x``.
        """
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary(self, positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return the cosines, then sines, of ``positions`` [tokens] by ``inverse`` [dim / 2].

        The result is float32 [tokens, dim].
        """
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
        """Rotate queries and keys, store keys and values; return the queries.

        ``qkv`` is [tokens, (heads + 2 kv heads) * dim], the queries are [tokens, heads, dim] of its
        dtype, in ``out`` where that is given.
        """
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

    def rotate(
        self, query: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, eps: float,
        dim: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``query`` [tokens, heads * dim], normalised where ``norm`` is given, rotated.

        The result is [tokens, heads, dim] of its dtype.
        """
        query = query.view(len(query), -1, dim)
        return rotate(query if norm is None else self.rms_norm(query, norm, eps), rotary)

    def store(self, key: torch.Tensor, value: torch.Tensor, plan: StepPlan, layer: int) -> None:
        """Write ``key`` and ``value`` [tokens, kv heads, dim] to their slots of ``layer``."""
        for pages, rows in zip(plan.of(layer), (key, value), strict=True):
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
        """Return attention of ``query`` [tokens, heads, dim] over gathered keys and values.

        Prompt by prompt; the same shape and dtype, in ``out`` where that is given.
        """
        if plan.derived is None:
            plan.derived = gather(plan)
        parts = []
        if plan.decodes:
            parts.append(_decode(query[: plan.decodes], plan, layer, scale, window))
        for number in range(len(plan.derived.prefills)):
            parts.append(_prefill(query, plan, layer, number, scale, window))
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found if out is None else out.copy_(found)

    def add_attended(
        self,
        query: torch.Tensor,
        plan: StepPlan,
        layer: int,
        scale: float,
        window: int | None,
        weight: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        """Add the attention of ``query`` times ``weight`` to ``into`` [tokens, size]."""
        self.add_product(self.attend(query, plan, layer, scale, window).flatten(1), weight, into)

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> None:
        """Add ``x`` [rows, columns] times ``weight`` [size, columns] to ``into`` [rows, size]."""
        into += product(x, weight, None)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x`` [rows, columns] times ``weight`` [size, columns]; [rows, size]."""
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
        """Return ``x`` [1, columns] times ``weight`` [size, columns]; [1, size].

        Step by step; added to ``into`` in place where given.
        """
        out = product(x if norm is None else self.rms_norm(x, norm, eps), weight, bias)
        if silu:
            out = self.silu_mul(out)
        if into is None:
            return out
        into += out
        return into

    def experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        chosen: int,
        normalised: bool,
    ) -> torch.Tensor:
        """Return the sum of each row's experts, of the shape and dtype of ``x`` [tokens, hidden].

        Expert by expert.
        """
        return experts_reference.experts(x, router, gate_up, down, chosen, normalised)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the best column of ``logits`` [rows, columns], of equal ones the first."""
        return logits.argmax(dim=-1)

    def draw(self, logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Draw a column of each row from its softmax, int64 [rows]: the same on each device.

        ``logits`` are [rows, columns], ``scales`` float32 [rows] one over the temperatures, and
        ``keys`` int32 [rows, 2].
        """
        return by_noise.draw(logits, scales, keys)

    def best_keys(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """int64 [rows]: a key of the best column of each row of ``x`` [rows, columns].

        ``first`` is the number of its first column in the whole row.
        """
        value = torch.nan_to_num(x.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        highest, at = value.max(dim=-1)
        # As an integer with the order of the floats; no zero is less than another.
        bits = (highest + 0.0).view(torch.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return (ordered.long() << 32) | (KEY_LOWER - (first + at))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, size] of ``gate_up`` [rows, 2 * size], in its dtype."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def gated(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return :meth:`silu_mul` of :meth:`linear`, [rows, size].

        ``x`` is [rows, columns], ``weight`` [2 * size, columns].
        """
        return self.silu_mul(self.linear(x, weight, bias))


def write_quantized(
    pages: Pages, slots: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write ``values`` e4m3 [tokens, heads, dim] and their ``scales`` [tokens, heads, 1]."""
    assert pages.scales is not None
    # As bytes: torch copies no eight-bit floats by an index.
    pages.rows.view(torch.uint8).index_copy_(0, slots, values.view(torch.uint8))
    page, place = _places(pages.scales, slots)
    pages.scales[page, :, place] = scales.squeeze(-1)


def _read(pages: Pages, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., heads, dim] of ``dtype`` at ``slots`` [...]."""
    if pages.scales is None:
        return _rows_at(pages.rows, slots)
    rows = _rows_at(pages.rows.view(torch.uint8), slots).view(pages.rows.dtype)
    page, place = _places(pages.scales, slots)
    return dequantize(rows, pages.scales[page, :, place].unsqueeze(-1)).to(dtype)


def _rows_at(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the ``rows`` [rows, heads, dim] at ``slots`` [...], each row copied as a whole.

    An index would copy element by element, which takes several times as long on a CPU.
    """
    return rows.index_select(0, slots.flatten()).view(*slots.shape, *rows.shape[1:])


def _places(scales: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block of each of ``slots``, and its place there."""
    return slots // scales.shape[-1], slots % scales.shape[-1]


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [tokens, heads, dim] with its halves rotated by ``rotary`` [tokens, dim].

    RoFormer, in the layout of Llama's checkpoints. The same shape and dtype.
    """
    cos, sin = rotary.unsqueeze(1).chunk(2, dim=-1)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def gather(plan: StepPlan) -> Gather:
    """Return what :meth:`ReferenceOps.attend` reads in every layer of this step."""
    contexts, starts = plan.contexts.tolist(), plan.starts.tolist()
    offsets = torch.arange(plan.block_size, device=plan.tables.device)
    slots = (plan.tables.long().unsqueeze(-1) * plan.block_size + offsets).flatten(1)
    widest = max(contexts[: plan.decodes], default=0)
    prefills = [
        Prefill(starts[row], starts[row + 1], slots[row, : contexts[row]])
        for row in range(plan.decodes, len(contexts))
    ]
    return Gather(slots[: plan.decodes, :widest], prefills)


def _mask(
    plan: StepPlan, number: int, newest: torch.Tensor, length: int, window: int | None
) -> torch.Tensor:
    """Return True where row i, whose own position is ``newest[i]``, sees token j of ``length``."""
    masks = plan.derived.masks
    mask: torch.Tensor | None = masks.get((number, window))
    if mask is None:
        context, newest = torch.arange(length, device=newest.device), newest.unsqueeze(-1)
        mask = context <= newest
        if window is not None:
            mask &= context > newest - window
        masks[number, window] = mask
    return mask


def _decode(
    query: torch.Tensor, plan: StepPlan, layer: int, scale: float, window: int | None
) -> torch.Tensor:
    rows, heads, dim = query.shape
    slots = plan.derived.decode_slots
    keys, values = (_read(pages, slots, query.dtype) for pages in plan.of(layer))
    kv_heads = keys.shape[2]
    mask = _mask(plan, -1, plan.contexts[: plan.decodes] - 1, slots.shape[1], window)
    # The query heads that share a kv head become query rows of it: no key is copied per head.
    out = scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask[:, None, None, :],
        scale=scale,
    )
    return out.reshape(rows, heads, dim)


def _prefill(
    query: torch.Tensor, plan: StepPlan, layer: int, number: int, scale: float, window: int | None
) -> torch.Tensor:
    prefill: Prefill = plan.derived.prefills[number]
    keys, values = (_read(pages, prefill.slots, query.dtype) for pages in plan.of(layer))
    groups = query.shape[1] // keys.shape[1]
    length, new = len(prefill.slots), prefill.stop - prefill.start
    newest = torch.arange(length - new, length, device=query.device)
    out = scaled_dot_product_attention(
        query[prefill.start : prefill.stop].transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
        values.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
        attn_mask=_mask(plan, number, newest, length, window),
        scale=scale,
    )
    return out[0].transpose(0, 1)
