"""Attention of one new token per sequence over its context in the paged KV pool.

It is memory-bound: each key and value is read once for all query heads that share it. A context is
split into ``splits`` parts of whole tiles, and one program computes each part, so that a few long
sequences fill the GPU. A second kernel combines the parts by their log-sum-exp (Flash-Decoding).

By default, Triton compiles a variant for arguments that are 1 or a multiple of 16, and for aligned
pointers. Arguments that change from step to step are excluded from this specialisation, here and in
the other kernels. Otherwise, each combination would be compiled or loaded while requests wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.decode_cut import WIDE_TILE, Cut, choose_cut, compute_row_bytes
from plimsoll_engine.kernels.overlap import allow_next_kernel, overlap, wait_for_previous_kernel
from plimsoll_engine.kernels.sizes import next_power_of_2
from plimsoll_engine.kernels.step_plan import Pages

NO_WINDOW = 1 << 30
LOG2_E = 1.4426950408889634
SCALED_REGISTERS = 128
"""Registers per thread for e4m3 keys.

With wide tiles, four programs on a multiprocessor then have as many bytes in flight as with 16-bit
keys. The compiler reports no spills. Without the limit, it uses 168 registers.
"""


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["tables", "contexts", "lse", "key_scales", "value_scales"],
)
def _decode_attention(
    query, keys, values, key_scales, value_scales, tables, contexts, out, lse, scale, window, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    allow_next_kernel(OVERLAP)
    context = tl.load(contexts + sequence)
    lowest = tl.maximum(context - window, 0)
    base = lowest // TILE * TILE
    per_split = tl.cdiv(tl.cdiv(context - base, TILE), SPLITS) * TILE
    begin = base + split * per_split
    end = tl.minimum(begin + per_split, context)

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + group
    here = (group[:, None] < GROUP) & (dims[None, :] < DIM)
    row = sequence * KV_HEADS * GROUP + head
    wait_for_previous_kernel(
        OVERLAP
    )  # contexts and tables were written before the step's first kernel
    q = tl.load(query + row[:, None] * DIM + dims[None, :], mask=here, other=0.0)
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    weighted = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < end
        page = tl.load(tables + sequence * width + token // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        at = (slot * KV_HEADS + kv_head) * DIM
        there = inside[:, None] & (dims[None, :] < DIM)
        k = tl.load(keys + at[:, None] + dims[None, :], mask=there, other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SCALED:
            row_scale = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + token % PAGE
            score *= tl.load(key_scales + row_scale, mask=inside, other=0.0)[None, :]
        score = tl.where((inside & (token >= lowest))[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        kept = tl.exp2(best - higher)
        total = total * kept + tl.sum(share, axis=1)
        v = tl.load(values + at[:, None] + dims[None, :], mask=there, other=0.0).to(q.dtype)
        if SCALED:
            share *= tl.load(value_scales + row_scale, mask=inside, other=0.0)[None, :]
        weighted = weighted * kept[:, None]
        weighted += tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    # A padding row has no context: its result is zero.
    safe = tl.where(total > 0, total, 1.0)
    result = (weighted / safe[:, None]).to(out.dtype.element_ty)
    place = row * SPLITS + split
    tl.store(out + place[:, None] * DIM + dims[None, :], result, mask=here)
    if SPLITS > 1:
        log = tl.where(total > 0, best + tl.log2(safe), float("-inf"))
        tl.store(lse + place, log, mask=group < GROUP)


@triton.jit
def _join(
    parts, lse, out, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM_PAD)
    log = tl.load(lse + row * SPLITS + split)
    highest = tl.max(log, axis=0)
    share = tl.where(log > float("-inf"), tl.exp2(log - highest), 0.0)
    total = tl.sum(share, axis=0)
    there = (share[:, None] > 0) & (dims[None, :] < DIM)
    part = tl.load(
        parts + (row * SPLITS + split)[:, None] * DIM + dims[None, :], mask=there, other=0.0
    )
    result = tl.sum(part * share[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + dims, result.to(out.dtype.element_ty), mask=dims < DIM)


def decode_attention(
    query: torch.Tensor,
    keys: Pages,
    values: Pages,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    page: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    limit: int = 0,
    cut: Cut | None = None,
) -> None:
    """Write the attention of ``query`` over ``keys`` and ``values`` to ``out``.

    ``query`` and ``out`` are [sequences, heads, dim]. The rows of ``keys`` and ``values`` are
    [slots, kv heads, dim] of the same dtype, or e4m3 with scales. ``tables`` int32 [sequences,
    width] are the block numbers of each sequence, with ``page`` tokens per block. ``contexts``
    int32 [sequences] are the numbers of tokens; a context of 0 gives zeros. ``limit`` is the
    argument of :func:`choose_cut`.
    """
    sequences, heads, dim = query.shape
    kv_heads, scaled = keys.rows.shape[1], keys.scales is not None
    dim_pad = next_power_of_2(dim)
    row_bytes = compute_row_bytes(dim, keys.rows.element_size())
    tile, splits = cut or choose_cut(sequences, kv_heads, row_bytes, limit)
    options: dict[str, object] = {**overlap(query.device)}
    if scaled and cut is None:
        tile, options = WIDE_TILE, options | {"maxnreg": SCALED_REGISTERS}
    parts, lse = out, contexts
    if splits > 1:
        shape = sequences, heads, splits, dim
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
    _decode_attention[(kv_heads, sequences, splits)](
        query, keys.rows, values.rows, keys.scales if scaled else query,
        values.scales if scaled else query, tables, contexts, parts, lse, scale * LOG2_E,
        NO_WINDOW if window is None else window, tables.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        GROUP_PAD=max(16, next_power_of_2(heads // kv_heads)), DIM=dim, DIM_PAD=dim_pad,
        PAGE=page, TILE=tile, SPLITS=splits, SCALED=scaled,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3, **options,
    )  # fmt: skip
    if splits > 1:
        _join[(sequences * heads,)](
            parts, lse, out, DIM=dim, DIM_PAD=dim_pad, SPLITS=splits, num_warps=2,
            **overlap(query.device),
        )  # fmt: skip
