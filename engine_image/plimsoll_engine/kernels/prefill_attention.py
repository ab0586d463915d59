"""Attention of prompt chunks over their contexts in the paged KV pool.

A program computes a tile of a chunk's rows for one query head, with an online softmax
(FlashAttention-2). Every loop must visibly run at least once, because otherwise NVIDIA's assembler
serialises all matrix instructions (advisory C7515).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.decode_attention import LOG2_E, NO_WINDOW
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2
from plimsoll_engine.kernels.step_plan import Pages

# A multiprocessor runs two such programs, so that the softmax of one overlaps with the products of
# the other. On an H200, they reach 359 TFLOP/s at 4,000 rows, and 222 at 100 to 1,024 rows.
# Programs of 128 rows reach 310 and 182.
ROWS_PER_PROGRAM, KEYS_PER_TILE = 64, 64
NUM_WARPS, NUM_STAGES = 4, 3
# For float32, which is multiplied with full precision and without tensor cores.
FLOAT32_ROWS, FLOAT32_KEYS = 32, 32


@triton.jit
def _attend_range(
    q, best, total, weighted, keys, values, key_scales, value_scales, table, begin, end, limit,
    newest, scale, window, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    tl.assume(begin < end)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        if MASKED:
            page = tl.load(table + token // PAGE, mask=token < limit, other=0)
        else:
            page = tl.load(table + token // PAGE)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        offsets = (slot * KV_HEADS + kv_head) * DIM
        if MASKED or DIM != DIM_PAD:
            mask = (token < limit)[:, None] & (dims[None, :] < DIM)
            k = tl.load(keys + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            v = tl.load(values + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(keys + offsets[:, None] + dims[None, :])
            v = tl.load(values + offsets[:, None] + dims[None, :])
        k, v = k.to(q.dtype), v.to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SCALED:
            valid = token < limit
            row_scale = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + token % PAGE
            score *= tl.load(key_scales + row_scale, mask=valid, other=0.0)[None, :]
        if MASKED:
            visible = (token[None, :] <= newest[:, None]) & (
                token[None, :] > newest[:, None] - window
            )
            score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1) * scale)
        base = tl.where(higher > float("-inf"), higher, 0.0) if MASKED else higher
        share = tl.exp2(score * scale - base[:, None])
        rescale = tl.exp2(best - base)
        total = total * rescale + tl.sum(share, axis=1)
        if SCALED:
            share *= tl.load(value_scales + row_scale, mask=valid, other=0.0)[None, :]
        weighted = weighted * rescale[:, None]
        weighted = tl.dot(share.to(v.dtype), v, weighted, input_precision=PRECISION)
        best = higher
    return best, total, weighted


@triton.jit(
    do_not_specialize=["first", "width"],
    do_not_specialize_on_alignment=["tables", "contexts", "starts", "key_scales", "value_scales"],
)
def _prefill_attention(
    query, keys, values, key_scales, value_scales, tables, contexts, starts, out, scale, window,
    first, width, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Start the last tiles first, because they have the longest contexts.
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    head, sequence = tl.program_id(0), (first + tl.program_id(1)).to(tl.int64)
    kv_head = head // GROUP
    begin_row = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - begin_row).to(tl.int32)
    if tile * ROWS >= count:
        return
    context = tl.load(contexts + sequence)
    oldest = context - count + tile * ROWS
    row = tile * ROWS + tl.arange(0, ROWS)
    newest = context - count + row
    dims = tl.arange(0, DIM_PAD)
    mask = (row < count)[:, None] & (dims[None, :] < DIM)
    offsets = ((begin_row + row) * (KV_HEADS * GROUP) + head)[:, None] * DIM + dims[None, :]
    q = tl.load(query + offsets, mask=mask, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIM_PAD], tl.float32)
    table = tables + sequence * width
    end = tl.minimum(oldest + ROWS, context)
    # From this tile on, which has the first row's own key, some keys are not visible to all rows.
    full = oldest // TILE * TILE
    best, total, weighted = _attend_range(
        q, best, total, weighted, keys, values, key_scales, value_scales, table, full, end,
        context, newest, scale, window, kv_head, KV_HEADS, DIM, DIM_PAD, PAGE, TILE, True,
        SCALED, PRECISION,
    )  # fmt: skip
    clear = 0
    if WINDOWED:
        # The keys that are visible to every row begin with the last row's window.
        low = tl.maximum(oldest - window + 1, 0) // TILE * TILE
        clear = tl.cdiv(tl.maximum(oldest + ROWS - window, 0), TILE) * TILE
        clear = tl.minimum(clear, full)
        if low < clear:
            best, total, weighted = _attend_range(
                q, best, total, weighted, keys, values, key_scales, value_scales, table, low,
                clear, context, newest, scale, window, kv_head, KV_HEADS, DIM, DIM_PAD, PAGE,
                TILE, True, SCALED, PRECISION,
            )  # fmt: skip
    if clear < full:
        best, total, weighted = _attend_range(
            q, best, total, weighted, keys, values, key_scales, value_scales, table, clear, full,
            context, newest, scale, window, kv_head, KV_HEADS, DIM, DIM_PAD, PAGE, TILE, False,
            SCALED, PRECISION,
        )  # fmt: skip
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    query: torch.Tensor,
    keys: Pages,
    values: Pages,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    starts: torch.Tensor,
    first_sequence: int,
    max_rows: int,
    block_size: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Write the causal attention of the prompt chunks in ``query`` [tokens, heads, dim] to ``out``.

    The chunks are the rows of the sequences from ``first_sequence`` on, each with up to
    ``max_rows`` rows. Sequence s has the rows from ``starts[s]`` on, which are the last tokens of
    its context. For the other arguments, see
    :func:`plimsoll_engine.kernels.decode_attention.decode_attention`.
    """
    heads, dim = query.shape[1:]
    kv_heads, scaled = keys.rows.shape[1], keys.scales is not None
    wide = query.dtype == torch.float32
    rows, tile = (FLOAT32_ROWS, FLOAT32_KEYS) if wide else (ROWS_PER_PROGRAM, KEYS_PER_TILE)
    _prefill_attention[(heads, len(contexts) - first_sequence, cdiv(max_rows, rows))](
        query, keys.rows, values.rows, keys.scales if scaled else out,
        values.scales if scaled else out, tables, contexts, starts, out, scale * LOG2_E,
        NO_WINDOW if window is None else window, first_sequence, tables.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)), PAGE=block_size, ROWS=rows,
        TILE=tile, WINDOWED=window is not None, SCALED=scaled,
        PRECISION="ieee" if wide else "tf32",
        num_warps=NUM_WARPS, num_stages=2 if wide else NUM_STAGES,
    )  # fmt: skip
