"""Attention of whole prompts by the library: they need no part of the KV pool.

It reads the step's own rows of a layer, which :class:`Fresh` keeps until then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from plimsoll_engine.kernels.step_plan import StepPlan

LIBRARY_ROWS = 1536
"""From so many rows on a whole prompt, which needs no part of the pool, is the library's: 510 to
560 TFLOP/s on an H200 at 4000 rows and 128 dimensions, where ours has 359. Of prompts of unequal
lengths, each takes a call and a copy; by times, ours is faster up to 1,400 rows with 32 heads, and
up to 2,500 with 16."""
LIBRARY_STEP = 256
"""Such prompts are padded to a multiple: the library keeps a plan for each length that it meets."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Of the library, the fastest first."""


def whole_prompts(plan: StepPlan, window: int | None = None) -> tuple[int, ...]:
    """Return the rows of the prompts that are the library's, the last ones of the step.

    There are none in a layer with a ``window``.
    """
    return plan.fresh[bisect_left(plan.fresh, LIBRARY_ROWS) :] if window is None else ()


def fastest_first(plan: StepPlan) -> AbstractContextManager[None]:
    """Return a context in which the library computes the whole prompts of a step the fastest way.

    It is for the whole step: to enter it takes the host as long as a launch.
    """
    return sdpa_kernel(BACKENDS, set_priority=True) if whole_prompts(plan) else nullcontext()


def _padded(rows: int) -> int:
    return -(-rows // LIBRARY_STEP) * LIBRARY_STEP


class Fresh(NamedTuple):
    """A step's own rows in one layer.

    ``pairs`` [2, tokens + tail, kv heads, dim] are its keys and values, ``query`` [tokens + tail,
    heads, dim] where it has a tail already; all of the model's dtype.
    """

    pairs: torch.Tensor
    query: torch.Tensor | None = None


def tail_rows(plan: StepPlan) -> int | None:
    """Rows of padding behind the step's last prompt; None where none is the library's."""
    whole = whole_prompts(plan)
    return _padded(whole[-1]) - whole[-1] if whole else None


def with_tail(x: torch.Tensor, tail: int) -> torch.Tensor:
    """Return ``x`` [..., tokens, heads, dim] with ``tail`` rows of zeros behind it: a copy."""
    return pad(x, (0, 0, 0, 0, 0, tail))


def _causal(
    query: torch.Tensor, pairs: torch.Tensor, first: int, count: int, rows: int, scale: float
) -> torch.Tensor:
    """Return causal attention within each of ``count`` prompts of ``rows`` tokens.

    The prompts begin at row ``first``; the result is [count, rows, heads, dim] in the model's
    dtype. The padding of a prompt are the rows behind it, the next one's or zeros: no row of its
    own attends to them. So nothing is copied.
    """

    def prompts(x: torch.Tensor) -> torch.Tensor:
        heads, dim = x.shape[1:]
        row = heads * dim
        return x.as_strided(
            (count, heads, _padded(rows), dim),
            (rows * row, dim, row, 1),
            x.storage_offset() + first * row,
        )

    found = scaled_dot_product_attention(
        prompts(query), prompts(pairs[0]), prompts(pairs[1]),
        is_causal=True, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return found[:, :, :rows].transpose(1, 2)


def attend_whole(
    query: torch.Tensor, plan: StepPlan, scale: float, window: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Give the attention of the prompts that are the library's, and where they begin in the step.

    It is [prompts, rows, heads, dim] for those of equal rows in ``query`` [tokens, heads, dim]. The
    rows of a prompt lie together, and those of the next behind a gap.
    """
    whole = whole_prompts(plan, window)
    if not whole:
        return
    rows_in_all = query.shape[0]
    first = rows_in_all - sum(whole)
    fresh: Fresh = plan.derived
    tail = fresh.pairs.shape[1] - rows_in_all
    query = fresh.query if fresh.query is not None else with_tail(query, tail)
    for rows, equal in groupby(whole):
        count = len(list(equal))
        yield first, _causal(query, fresh.pairs, first, count, rows, scale)
        first += count * rows
