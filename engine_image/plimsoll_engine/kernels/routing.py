"""Select the experts of each row in a mixture of experts, and sort the rows by expert.

Each expert's (row, expert) pairs are padded to whole blocks. The host must not wait for the number
of blocks, so arrays have the maximum size, and blocks without an expert are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import next_power_of_2

# Owner of a block without an expert.
NO_EXPERT = tl.constexpr(-1)
# Number of items of ``owners`` that a program stores at a time.
OWNERS_PER_STORE = tl.constexpr(128)


class Routes(NamedTuple):
    """Routing of a step's rows to experts. Pair p belongs to row ``p // top_k``."""

    shares: torch.Tensor  # [rows, top_k], the weights of each row's experts
    # int32 [blocks * pairs per block], the pairs by expert, padded with their number.
    order: torch.Tensor
    owners: torch.Tensor  # int32 [blocks], the experts of the blocks; -1 for none


@triton.jit
def _choose_experts(
    logits, experts, shares, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    CHOSEN: tl.constexpr, CHOSEN_PAD: tl.constexpr, NORMALISED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    inside = expert < EXPERTS
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    logit = tl.load(logits + row * EXPERTS + expert, mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    part = tl.exp(logit - tl.max(logit, axis=0))
    remaining = part / tl.sum(part, axis=0)
    # Replace NaN by zero, so that the result is always a valid expert.
    remaining = tl.where(remaining == remaining, remaining, 0.0)
    remaining = tl.where(inside, remaining, -1.0)
    place = tl.arange(0, CHOSEN_PAD)
    best = tl.zeros([CHOSEN_PAD], tl.float32)
    where = tl.zeros([CHOSEN_PAD], tl.int32)
    for number in tl.static_range(0, CHOSEN):
        share, index = tl.max(remaining, axis=0, return_indices=True)
        best = tl.where(place == number, share, best)
        where = tl.where(place == number, index.to(tl.int32), where)
        remaining = tl.where(expert == index, -1.0, remaining)
    if NORMALISED:
        best = best / tl.sum(best, axis=0)
    chosen = place < CHOSEN
    tl.store(shares + row * CHOSEN + place, best.to(shares.dtype.element_ty), mask=chosen)
    tl.store(experts + row * CHOSEN + place, where, mask=chosen)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _sort_pairs(
    experts, order, owners, pairs, blocks, BINS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    own_expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        # The last bin belongs to no expert and counts the padding.
        expert = tl.load(experts + pair, mask=pair < pairs, other=BINS - 1)
        counts += tl.histogram(expert, BINS)
    needed = tl.where(bins < BINS - 1, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(bins < own_expert, needed, 0), axis=0)
    own_blocks = tl.sum(tl.where(bins == own_expert, needed, 0), axis=0)
    count = tl.sum(tl.where(bins == own_expert, counts, 0), axis=0)
    for start in range(0, own_blocks, OWNERS_PER_STORE):
        block = start + tl.arange(0, OWNERS_PER_STORE)
        tl.store(
            owners + first + block,
            tl.zeros([OWNERS_PER_STORE], tl.int32) + own_expert,
            mask=block < own_blocks,
        )
    if own_expert == tl.num_programs(0) - 1:
        for start in range(first + own_blocks, blocks, OWNERS_PER_STORE):
            block = start + tl.arange(0, OWNERS_PER_STORE)
            tl.store(
                owners + block,
                tl.full([OWNERS_PER_STORE], NO_EXPERT, tl.int32),
                mask=block < blocks,
            )
    padding = count + tl.arange(0, ROWS)
    nothing = tl.zeros([ROWS], tl.int32) + pairs
    tl.store(order + first * ROWS + padding, nothing, mask=padding < own_blocks * ROWS)
    free = first * ROWS
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        expert = tl.load(experts + pair, mask=pair < pairs, other=BINS - 1)
        hit = (expert == own_expert).to(tl.int32)
        tl.store(order + free + tl.cumsum(hit, axis=0) - 1, pair, mask=hit > 0)
        free += tl.sum(hit, axis=0)


def compute_max_blocks(num_pairs: int, num_experts: int, pairs_per_block: int) -> int:
    """Return the maximum number of blocks, for any distribution of the pairs over experts."""
    return (num_pairs + min(num_experts, num_pairs) * (pairs_per_block - 1)) // pairs_per_block


def route(
    logits: torch.Tensor, top_k: int, normalised: bool, pairs_per_block: int, pairs_per_tile: int
) -> Routes:
    """Return the routes for ``logits`` [tokens, experts], in blocks of ``pairs_per_block`` pairs.

    If ``normalised``, the weights of each row add up to 1. The sort processes ``pairs_per_tile``
    pairs at a time.
    """
    tokens, experts = logits.shape
    pairs = tokens * top_k
    blocks = compute_max_blocks(pairs, experts, pairs_per_block)
    numbers = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    shares = logits.new_empty(tokens, top_k)
    order = numbers.new_empty(blocks * pairs_per_block)
    owners = numbers.new_empty(blocks)
    launch = get_launch_options(logits.device)
    _choose_experts[(tokens,)](
        logits, numbers, shares, EXPERTS=experts, EXPERTS_PAD=next_power_of_2(experts),
        CHOSEN=top_k, CHOSEN_PAD=next_power_of_2(top_k), NORMALISED=normalised,
        num_warps=1, **launch,
    )  # fmt: skip
    _sort_pairs[(experts,)](
        numbers, order, owners, pairs, blocks, BINS=next_power_of_2(experts + 1),
        ROWS=pairs_per_block, TILE=pairs_per_tile, num_warps=8, **launch,
    )  # fmt: skip
    return Routes(shares, order, owners)
