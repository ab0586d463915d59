"""Which experts each row of a mixture goes to, and the rows of each expert side by side.

A row goes to its ``chosen`` best experts: that many pairs of a row and an expert. The grouped
products work on blocks of pairs of one expert, so the pairs are sorted by expert, and each expert's
are padded to whole blocks. How many blocks there are depends on the rows, and the host never asks:
everything has the size of the worst case, and blocks without an expert are skipped. So a CUDA graph
can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.overlap import after_last, let_next, overlap
from plimsoll_engine.kernels.sizes import next_power_of_2

NOBODY = tl.constexpr(-1)
"""The owner of a block that no expert has."""
OWNERS = tl.constexpr(128)
"""So many entries of the owners are written at once."""


class Routes(NamedTuple):
    """The pairs of a step. Pair p is row ``p // chosen``.

    ``shares`` [rows, chosen] are the weights of a row's experts, in the model's dtype. ``order``
    int32 [blocks * block rows] are the pairs by expert, with the number of pairs as padding, and
    ``owners`` int32 [blocks] is the expert of each block, negative where there is none.
    """

    shares: torch.Tensor
    order: torch.Tensor
    owners: torch.Tensor


@triton.jit
def _choose(
    logits, experts, shares, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    CHOSEN: tl.constexpr, CHOSEN_PAD: tl.constexpr, NORMALISED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    inside = expert < EXPERTS
    let_next(OVERLAP)
    after_last(OVERLAP)
    logit = tl.load(logits + row * EXPERTS + expert, mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    part = tl.exp(logit - tl.max(logit, axis=0))
    left = part / tl.sum(part, axis=0)
    # What is not a number is never better than a number: the answer is an expert whatever it holds.
    left = tl.where(left == left, left, 0.0)
    left = tl.where(inside, left, -1.0)
    place = tl.arange(0, CHOSEN_PAD)
    best = tl.zeros([CHOSEN_PAD], tl.float32)
    where = tl.zeros([CHOSEN_PAD], tl.int32)
    for number in tl.static_range(0, CHOSEN):
        share, at = tl.max(left, axis=0, return_indices=True)
        best = tl.where(place == number, share, best)
        where = tl.where(place == number, at.to(tl.int32), where)
        left = tl.where(expert == at, -1.0, left)
    if NORMALISED:
        best = best / tl.sum(best, axis=0)
    chosen = place < CHOSEN
    tl.store(shares + row * CHOSEN + place, best.to(shares.dtype.element_ty), mask=chosen)
    tl.store(experts + row * CHOSEN + place, where, mask=chosen)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _sort(
    experts, order, owners, pairs, blocks, BINS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    let_next(OVERLAP)
    after_last(OVERLAP)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        # No expert has the last bin: it counts what is behind the pairs.
        expert = tl.load(experts + pair, mask=pair < pairs, other=BINS - 1)
        counts += tl.histogram(expert, BINS)
    needed = tl.where(bins < BINS - 1, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(bins < mine, needed, 0), axis=0)
    own = tl.sum(tl.where(bins == mine, needed, 0), axis=0)
    count = tl.sum(tl.where(bins == mine, counts, 0), axis=0)
    for start in range(0, own, OWNERS):
        block = start + tl.arange(0, OWNERS)
        tl.store(owners + first + block, tl.zeros([OWNERS], tl.int32) + mine, mask=block < own)
    if mine == tl.num_programs(0) - 1:
        for start in range(first + own, blocks, OWNERS):
            block = start + tl.arange(0, OWNERS)
            tl.store(owners + block, tl.full([OWNERS], NOBODY, tl.int32), mask=block < blocks)
    padding = count + tl.arange(0, ROWS)
    nothing = tl.zeros([ROWS], tl.int32) + pairs
    tl.store(order + first * ROWS + padding, nothing, mask=padding < own * ROWS)
    free = first * ROWS
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        expert = tl.load(experts + pair, mask=pair < pairs, other=BINS - 1)
        hit = (expert == mine).to(tl.int32)
        tl.store(order + free + tl.cumsum(hit, axis=0) - 1, pair, mask=hit > 0)
        free += tl.sum(hit, axis=0)


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return how many blocks of ``rows`` pairs there can be, however the pairs are spread.

    The worst is one pair too many in the last block of each expert that has any.
    """
    return (pairs + min(experts, pairs) * (rows - 1)) // rows


def route(logits: torch.Tensor, chosen: int, normalised: bool, rows: int, tile: int) -> Routes:
    """Return the routes of ``logits`` [tokens, experts] in blocks of ``rows`` pairs.

    The softmax is in float32. With ``normalised`` the shares of a row sum up to one. ``tile`` pairs
    are sorted at a time.
    """
    tokens, experts = logits.shape
    pairs = tokens * chosen
    blocks = most_blocks(pairs, experts, rows)
    numbers = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    shares = logits.new_empty(tokens, chosen)
    order = numbers.new_empty(blocks * rows)
    owners = numbers.new_empty(blocks)
    launch = overlap(logits.device)
    _choose[(tokens,)](
        logits, numbers, shares, EXPERTS=experts, EXPERTS_PAD=next_power_of_2(experts),
        CHOSEN=chosen, CHOSEN_PAD=next_power_of_2(chosen), NORMALISED=normalised,
        num_warps=1, **launch,
    )  # fmt: skip
    _sort[(experts,)](
        numbers, order, owners, pairs, blocks, BINS=next_power_of_2(experts + 1),
        ROWS=rows, TILE=tile, num_warps=8, **launch,
    )  # fmt: skip
    return Routes(shares, order, owners)
