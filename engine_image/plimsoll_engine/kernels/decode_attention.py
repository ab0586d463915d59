"""Attention of one new token per sequence over its context in the paged KV pool.

A context is split into parts, one per program, so that even a few long contexts fill the GPU. The
last program of a context combines the parts in a fixed order (Flash-Decoding), so the result is
deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.decode_partition import (
    WIDE_TILE_TOKENS,
    Partition,
    choose_partition,
    compute_row_bytes,
)
from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2
from plimsoll_engine.kernels.step_plan import Pages

NO_WINDOW = 1 << 30
LOG2_E = 1.4426950408889634
# Number of parts of a context that are loaded and combined at a time.
PARTS_PER_LOAD = tl.constexpr(4)
# Log-sum-exp of a part without scores. It is finite, because inf - inf is NaN.
EMPTY_LOG_SUM = tl.constexpr(-1e30)
# For e4m3 keys. With this limit and wide tiles, a multiprocessor runs four programs, which have as
# many bytes in flight as with 16-bit keys. The compiler reports no spills. Without the limit, it
# uses 168 registers.
MAX_REGISTERS_FOR_E4M3_KEYS = 128


# Triton would compile variants for arguments that are 1 or a multiple of 16, and for aligned
# pointers, and requests would wait. Arguments that change from step to step are excluded here, and
# in the other kernels.
@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["tables", "contexts", "lse", "key_scales", "value_scales"],
)
def _decode_attention(
    query, keys, values, key_scales, value_scales, tables, contexts, out, sums, lse, arrivals,
    scale, window, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    TILES: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    allow_next_kernel(OVERLAP)
    # No wait is needed: contexts and tables were written before the step's first kernel.
    context = tl.load(contexts + sequence)
    lowest = tl.maximum(context - window, 0)
    base = lowest // TILE * TILE
    per_part = tl.maximum(tl.cdiv(tl.cdiv(context - base, TILE), SPLITS), TILES) * TILE
    begin = base + split * per_part
    end = tl.minimum(begin + per_part, context)
    # The first program of each context must stay: this kernel may not end before the previous one.
    if SPLITS > 1:  # noqa: SIM102
        if (split > 0) & (begin >= context):
            return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + group
    q_mask = (group[:, None] < GROUP) & (dims[None, :] < DIM)
    row = sequence * KV_HEADS * GROUP + head
    wait_for_previous_kernel(OVERLAP)
    q = tl.load(query + row[:, None] * DIM + dims[None, :], mask=q_mask, other=0.0)
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    weighted = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < end
        page = tl.load(tables + sequence * width + token // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        offsets = (slot * KV_HEADS + kv_head) * DIM
        kv_mask = inside[:, None] & (dims[None, :] < DIM)
        k = tl.load(keys + offsets[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SCALED:
            row_scale = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + token % PAGE
            score *= tl.load(key_scales + row_scale, mask=inside, other=0.0)[None, :]
        score = tl.where((inside & (token >= lowest))[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        rescale = tl.exp2(best - higher)
        total = total * rescale + tl.sum(share, axis=1)
        v = tl.load(values + offsets[:, None] + dims[None, :], mask=kv_mask, other=0.0).to(q.dtype)
        if SCALED:
            share *= tl.load(value_scales + row_scale, mask=inside, other=0.0)[None, :]
        weighted = weighted * rescale[:, None]
        weighted += tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    # A padding row has no context, and its result is zero.
    safe = tl.where(total > 0, total, 1.0)
    result = weighted / safe[:, None]
    place = out + row[:, None] * DIM + dims[None, :]
    if SPLITS > 1:
        parts = tl.cdiv(context - base, per_part)
        if parts > 1:
            head_mask = group < GROUP
            log = tl.where(total > 0, best + tl.log2(safe), EMPTY_LOG_SUM)
            tl.store(lse + row * SPLITS + split, log, mask=head_mask)
            tl.store(
                sums + (row * SPLITS + split)[:, None] * DIM + dims[None, :], result, mask=q_mask
            )
            tl.debug_barrier()
            counter = arrivals + sequence * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)
                _combine_parts(
                    sums, lse, place, row, head_mask, q_mask, parts, DIM, DIM_PAD, GROUP_PAD, SPLITS
                )
        else:
            tl.store(place, result.to(out.dtype.element_ty), mask=q_mask)
    else:
        tl.store(place, result.to(out.dtype.element_ty), mask=q_mask)


@triton.jit
def _combine_parts(
    sums, lse, place, row, head_mask, q_mask, parts, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    best = tl.full([GROUP_PAD], EMPTY_LOG_SUM, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    weighted = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for first in range(0, parts, PARTS_PER_LOAD):
        for number in tl.static_range(PARTS_PER_LOAD):
            exists = first + number < parts
            offsets = row * SPLITS + first + number
            # Bypass the L1 cache, because other multiprocessors have written these parts.
            log = tl.load(
                lse + offsets, mask=head_mask & exists, other=EMPTY_LOG_SUM, cache_modifier=".cg"
            )
            part = tl.load(
                sums + offsets[:, None] * DIM + dims[None, :], mask=q_mask & exists, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            higher = tl.maximum(best, log)
            rescale, share = tl.exp2(best - higher), tl.exp2(log - higher)
            total = total * rescale + share
            weighted = weighted * rescale[:, None] + part * share[:, None]
            best = higher
    tl.store(place, (weighted / total[:, None]).to(place.dtype.element_ty), mask=q_mask)


def decode_attention(
    query: torch.Tensor,
    keys: Pages,
    values: Pages,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    max_context: int = 0,
    partition: Partition | None = None,
) -> None:
    """Write the attention of ``query`` over ``keys`` and ``values`` to ``out``.

    ``query`` and ``out`` are [sequences, heads, dim]. The rows of ``keys`` and ``values`` are
    [slots, kv heads, dim]. ``tables`` int32 [sequences, width] are block numbers, and ``contexts``
    int32 [sequences] are lengths in tokens, up to ``max_context`` (0 if unknown). The result for an
    empty context is zeros.

    ``arrivals`` are int32 zeros, at least one per sequence and kv head, and are zero again
    afterwards. Kernels that share them must not run at the same time.
    """
    sequences, heads, dim = query.shape
    kv_heads, scaled = keys.rows.shape[1], keys.scales is not None
    dim_pad = next_power_of_2(dim)
    row_bytes = compute_row_bytes(dim, keys.rows.element_size())
    tile, splits, tokens = partition or choose_partition(
        sequences, kv_heads, row_bytes, max_context
    )
    options: dict[str, object] = {**get_launch_options(query.device)}
    if scaled and partition is None:
        tile, options = WIDE_TILE_TOKENS, options | {"maxnreg": MAX_REGISTERS_FOR_E4M3_KEYS}
    sums = lse = out
    if splits > 1:
        assert sequences * kv_heads <= len(arrivals)
        shape = sequences, heads, splits, dim
        sums = torch.empty(shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
    _decode_attention[(kv_heads, sequences, splits)](
        query, keys.rows, values.rows, keys.scales if scaled else query,
        values.scales if scaled else query, tables, contexts, out, sums, lse, arrivals,
        scale * LOG2_E, NO_WINDOW if window is None else window, tables.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        GROUP_PAD=max(16, next_power_of_2(heads // kv_heads)), DIM=dim, DIM_PAD=dim_pad,
        PAGE=block_size, TILE=tile, SPLITS=splits, TILES=max(1, cdiv(tokens, tile)), SCALED=scaled,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3, **options,
    )  # fmt: skip
