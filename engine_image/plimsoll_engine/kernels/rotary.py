"""Rotate queries and keys, normalise each head, and write keys and values to the KV pool.

A program processes one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.scaled_product import compute_row_scale, convert_to_fp8
from plimsoll_engine.kernels.sizes import next_power_of_2
from plimsoll_engine.kernels.step_plan import Pages


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _compute_rotary_table(
    positions, inverse, out, half, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < half
    frequency = tl.load(inverse + column, mask=inside, other=0.0)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(out + token * 2 * half + column, tl.cos(angle), mask=inside)
    tl.store(out + (token * 2 + 1) * half + column, tl.sin(angle), mask=inside)


@triton.jit
def _rotate_heads(
    source, weight, cos, sin, eps, limit, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    # Returns the two rotated halves of COUNT heads, their offsets and their mask. Columns from
    # ``limit`` on are read as zeros.
    head = tl.arange(0, COUNT_PAD)[:, None]
    column = tl.arange(0, HALF_PAD)[None, :]
    inside = (head < COUNT) & (column < HALF)
    offsets = head * (2 * HALF) + column
    mask = inside & (column < limit)
    left = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(left * left + right * right, axis=1) / (2 * HALF)
        inverse = tl.rsqrt(square + eps)[:, None]
        column_mask = column < HALF
        left *= inverse * tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32)
        right *= inverse * tl.load(weight + HALF + column, mask=column_mask, other=0.0).to(
            tl.float32
        )
    return left * cos - right * sin, right * cos + left * sin, offsets, inside


@triton.jit
def _store_scaled(
    target, scales, left, right, inside, head, COUNT: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    # As e4m3.
    largest = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))
    scale = compute_row_scale(largest)
    tl.store(target, convert_to_fp8(left, scale[:, None]), mask=inside)
    tl.store(target + HALF, convert_to_fp8(right, scale[:, None]), mask=inside)
    tl.store(scales, scale, mask=head < COUNT)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["slots", "key_scales", "value_scales"],
)
def _rotate_and_store(
    qkv, rotary, q_norm, k_norm, slots, query, keys, values, key_scales, value_scales, fresh_keys,
    fresh_values, tokens, eps, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, KV_HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    NORM: tl.constexpr, FRESH: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    dim: tl.constexpr = 2 * HALF
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    limit = tl.where(token < tokens, HALF, 0)  # rows of the tail are zeros
    source = qkv + token * (HEADS + 2 * KV_HEADS) * dim
    column = tl.arange(0, HALF_PAD)[None, :]
    cos = tl.load(rotary + token * dim + column, mask=column < limit, other=0.0)
    sin = tl.load(rotary + token * dim + HALF + column, mask=column < limit, other=0.0)
    if HEADS > 0:
        left, right, offsets, inside = _rotate_heads(
            source, q_norm, cos, sin, eps, limit, HEADS, HEADS_PAD, HALF, HALF_PAD, NORM
        )
        to = query + token * HEADS * dim + offsets
        tl.store(to, left.to(query.dtype.element_ty), mask=inside)
        tl.store(to + HALF, right.to(query.dtype.element_ty), mask=inside)
    if KV_HEADS > 0:
        slot = tl.load(slots + tl.minimum(token, tokens - 1)).to(tl.int64)
        source += HEADS * dim
        left, right, offsets, inside = _rotate_heads(
            source, k_norm, cos, sin, eps, limit, KV_HEADS, KV_HEADS_PAD, HALF, HALF_PAD, NORM
        )
        source += KV_HEADS * dim
        mask = inside & (column < limit)
        first = tl.load(source + offsets, mask=mask, other=0.0)
        last = tl.load(source + offsets + HALF, mask=mask, other=0.0)
        if (slot >= 0) & (token < tokens):
            place = slot * KV_HEADS * dim + offsets
            if SCALED:
                head = tl.arange(0, KV_HEADS_PAD)
                row_scale = (slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE
                _store_scaled(
                    keys + place, key_scales + row_scale, left, right, inside, head, KV_HEADS, HALF
                )
                _store_scaled(
                    values + place, value_scales + row_scale, first.to(tl.float32),
                    last.to(tl.float32), inside, head, KV_HEADS, HALF,
                )  # fmt: skip
            else:
                tl.store(keys + place, left.to(keys.dtype.element_ty), mask=inside)
                tl.store(keys + place + HALF, right.to(keys.dtype.element_ty), mask=inside)
                tl.store(values + place, first, mask=inside)
                tl.store(values + place + HALF, last, mask=inside)
        if FRESH:
            fresh_offsets = token * KV_HEADS * dim + offsets
            tl.store(fresh_keys + fresh_offsets, left.to(fresh_keys.dtype.element_ty), mask=inside)
            tl.store(
                fresh_keys + fresh_offsets + HALF,
                right.to(fresh_keys.dtype.element_ty),
                mask=inside,
            )
            tl.store(fresh_values + fresh_offsets, first, mask=inside)
            tl.store(fresh_values + fresh_offsets + HALF, last, mask=inside)


def compute_rotary_table(positions: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return the cosines, then the sines, of the rotary angles, as float32 [tokens, 2 * half].

    The angles are ``positions`` [tokens] times the frequencies ``inverse`` float32 [half].
    """
    tokens, half = len(positions), len(inverse)
    out = torch.empty(tokens, 2 * half, dtype=torch.float32, device=positions.device)
    _compute_rotary_table[(tokens,)](
        positions, inverse, out, half, BLOCK=next_power_of_2(half), num_warps=1,
        **get_launch_options(positions.device),
    )  # fmt: skip
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    rotary: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    slots: torch.Tensor,
    keys: Pages,
    values: Pages,
    tail: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys, and store keys and values. Return the queries and the fresh rows.

    ``slots`` [tokens] are slots in the KV pool; tokens with a negative slot are not stored. The
    queries are [tokens + tail, heads, dim]. The fresh rows [2, tokens + tail, kv heads, dim] are
    the keys and values of this step; None if ``tail`` is None. The last ``tail`` rows are zeros.
    """
    kv_heads, dim = keys.rows.shape[1:]
    scaled = keys.scales is not None
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    rows = tokens + (tail or 0)
    query = qkv.new_empty(rows, heads, dim) if out is None else out
    fresh = None if tail is None else qkv.new_empty(2, rows, kv_heads, dim)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rotate_and_store[(rows,)](
        qkv, rotary, q_norm, k_norm, slots, query, keys.rows, values.rows,
        keys.scales if scaled else rotary, values.scales if scaled else rotary,
        *((qkv, qkv) if fresh is None else fresh), tokens, eps,
        HEADS=heads, HEADS_PAD=next_power_of_2(max(1, heads)),
        KV_HEADS=kv_heads, KV_HEADS_PAD=next_power_of_2(kv_heads),
        HALF=dim // 2, HALF_PAD=next_power_of_2(dim // 2), NORM=norms is not None,
        FRESH=fresh is not None, SCALED=scaled,
        PAGE=1 if keys.scales is None else keys.scales.shape[-1], num_warps=4,
        **get_launch_options(qkv.device),
    )  # fmt: skip
    return query, fresh


def normalize_and_rotate(
    query: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, eps: float, dim: int
) -> torch.Tensor:
    """Return ``query`` [tokens, heads * dim] after the rotation, as [tokens, heads, dim].

    If ``norm`` [dim] is given, each head is first normalised by RMSNorm.
    """
    tokens, heads = len(query), query.shape[1] // dim
    out = query.new_empty(tokens, heads, dim)
    nothing = [query] * 6  # unused pointers of keys and values
    _rotate_and_store[(tokens,)](
        query, rotary, query if norm is None else norm, query, query, out, *nothing, tokens, eps,
        HEADS=heads, HEADS_PAD=next_power_of_2(heads), KV_HEADS=0, KV_HEADS_PAD=1,
        HALF=dim // 2, HALF_PAD=next_power_of_2(dim // 2), NORM=norm is not None,
        FRESH=False, SCALED=False, PAGE=1, num_warps=4, **get_launch_options(query.device),
    )  # fmt: skip
    return out
