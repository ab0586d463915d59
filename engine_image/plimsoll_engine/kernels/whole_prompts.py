"""Attention of whole prompts by the library: they need no part of the KV pool.

It reads the step's own rows of a layer, which :class:`Fresh` keeps until then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
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
JOINED_AFTER = 32
"""Steps with the same equal prompts until they are joined. The plan takes 45 ms on the host; two
prompts of 4,000 tokens in one call save .8 ms of a step in the shape of Qwen3-0.6B and 1.6 ms in
that of Llama-3.1-8B (H200)."""
MOST_GROUPS = 64
"""Groups of equal prompts that are counted at a time."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Of the library, the fastest first."""


def whole_prompts(plan: StepPlan, window: int | None = None) -> tuple[int, ...]:
    """Return the rows of the prompts that are the library's, the last ones of the step.

    There are none in a layer with a ``window``.
    """
    return plan.fresh[bisect_left(plan.fresh, LIBRARY_ROWS) :] if window is None else ()


def padded_lengths(longest: int) -> list[int]:
    """Return the padded lengths of the library's prompts, up to ``longest`` tokens."""
    return list(range(_padded(LIBRARY_ROWS), _padded(longest) + 1, LIBRARY_STEP))


@torch.inference_mode()
def make_plan(
    padded: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Have the library make its plan for prompts of ``padded`` tokens: some 45 ms on the host.

    The library keeps plans by thread, so this is for the one that computes the steps.
    """
    query = torch.zeros(padded, heads, dim, dtype=dtype, device=device)
    pairs = torch.zeros(2, padded, kv_heads, dim, dtype=dtype, device=device)
    with sdpa_kernel(BACKENDS, set_priority=True):
        _causal(query, pairs, 0, 1, padded, dim**-0.5)


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


class EqualPrompts:
    """Decides which equal prompts of a step are computed in one call.

    One call takes 1 to 3 % less of a step than one for each prompt, but needs a plan for their true
    length, since that is the distance from one to the next. So only equal prompts that come often
    are worth it: as in the ski rental problem, once the calls have cost about as much as the plan.
    """

    def __init__(self) -> None:
        self._steps: Counter[tuple[int, int]] = Counter()

    def joined(self, whole: tuple[int, ...]) -> frozenset[int]:
        """Count a step whose whole prompts have the lengths ``whole``; return those to join."""
        groups = {(rows, count) for rows, count in Counter(whole).items() if count > 1}
        if len(self._steps) > MOST_GROUPS:
            self._steps.clear()
        self._steps.update(groups)
        return frozenset(rows for rows, count in groups if self._steps[rows, count] > JOINED_AFTER)


def _groups(plan: StepPlan, window: int | None) -> list[tuple[int, int]]:
    """Return (length, count) of the prompts that a call of the library computes, in their order."""
    return [
        group
        for rows, equal in Counter(whole_prompts(plan, window)).items()
        for group in ([(rows, equal)] if rows in plan.joined else [(rows, 1)] * equal)
    ]


def fewest_rows(plan: StepPlan, window: int | None) -> int:
    """Return the rows of the smallest call; 0 where none is the library's."""
    return min((rows * count for rows, count in _groups(plan, window)), default=0)


def _causal(
    query: torch.Tensor, pairs: torch.Tensor, first: int, count: int, rows: int, scale: float
) -> torch.Tensor:
    """Return causal attention within each of ``count`` prompts of ``rows`` tokens.

    The prompts begin at row ``first``; the result is [count, rows, heads, dim] in the model's
    dtype. The padding of a prompt are the rows behind it, the next one's or zeros: no row of its
    own attends to them. So nothing is copied. The library keeps its plans by shapes and strides:
    the stride from one prompt to the next must not be the true length where there is no next one.
    """

    def prompts(x: torch.Tensor) -> torch.Tensor:
        heads, dim = x.shape[1:]
        row, padded = heads * dim, _padded(rows)
        return x.as_strided(
            (count, heads, padded, dim),
            ((padded if count == 1 else rows) * row, dim, row, 1),
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

    It is [prompts, rows, heads, dim] of those that one call computes, with ``query`` [tokens,
    heads, dim]. The rows of a prompt lie together, and those of the next behind a gap.
    """
    groups = _groups(plan, window)
    if not groups:
        return
    rows_in_all = query.shape[0]
    first = rows_in_all - sum(rows * count for rows, count in groups)
    fresh: Fresh = plan.derived
    tail = fresh.pairs.shape[1] - rows_in_all
    query = fresh.query if fresh.query is not None else with_tail(query, tail)
    for rows, count in groups:
        yield first, _causal(query, fresh.pairs, first, count, rows, scale)
        first += count * rows
