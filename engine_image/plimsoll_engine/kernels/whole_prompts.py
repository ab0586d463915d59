"""Attention of whole prompts with torch's library, which does not read the KV pool.

It reads the keys and values of the step itself, which :class:`FreshRows` keeps until then.
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
"""Minimum number of rows of a whole prompt for the library's attention.

On an H200 at 4,000 rows and 128 dimensions, the library reaches 510 to 560 TFLOP/s; our kernel
reaches 359. Prompts of unequal lengths need one call and one copy each. For these, our kernel is
faster up to 1,400 rows with 32 heads, and up to 2,500 with 16.
"""
LIBRARY_STEP = 256
"""Divisor of the padded length of a prompt, because the library makes a plan for each length."""
STEPS_UNTIL_JOINED = 32
"""Number of steps with the same equal prompts after which they are computed in one call.

The plan takes 45 ms on the host. Two prompts of 4,000 tokens in one call save 0.8 ms of a step in
the shape of Qwen3-0.6B. In the shape of Llama-3.1-8B, they save 1.6 ms (H200).
"""
MAX_GROUPS = 64
"""Maximum number of groups of equal prompts that are counted at a time."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Backends of the library, fastest first."""


def whole_prompts(plan: StepPlan, window: int | None = None) -> tuple[int, ...]:
    """Return the row counts of the step's last prompts, which the library computes.

    Return an empty tuple for a layer with a ``window``.
    """
    return plan.fresh[bisect_left(plan.fresh, LIBRARY_ROWS) :] if window is None else ()


def list_padded_lengths(longest: int) -> list[int]:
    """Return the padded lengths of prompts for the library, up to ``longest`` tokens."""
    return list(range(_padded(LIBRARY_ROWS), _padded(longest) + 1, LIBRARY_STEP))


@torch.inference_mode()
def make_plan(
    padded: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Make the library create its plan for prompts of ``padded`` tokens; 45 ms on the host.

    The library keeps plans per thread, so call this in the thread that computes steps.
    """
    query = torch.zeros(padded, heads, dim, dtype=dtype, device=device)
    pairs = torch.zeros(2, padded, kv_heads, dim, dtype=dtype, device=device)
    with sdpa_kernel(BACKENDS, set_priority=True):
        _causal(query, pairs, 0, 1, padded, dim**-0.5)


def select_fastest_backend(plan: StepPlan) -> AbstractContextManager[None]:
    """Return a context in which the library selects its fastest backend for whole prompts.

    Use one context for the whole step, because entering it takes as long as a launch.
    """
    return sdpa_kernel(BACKENDS, set_priority=True) if whole_prompts(plan) else nullcontext()


def _padded(rows: int) -> int:
    return -(-rows // LIBRARY_STEP) * LIBRARY_STEP


class FreshRows(NamedTuple):
    """Keys, values and queries of the step itself in one layer.

    ``pairs`` [2, tokens + tail, kv heads, dim] are its keys and values. ``query`` is [tokens +
    tail, heads, dim]; None if it has no tail yet. All have the model's dtype.
    """

    pairs: torch.Tensor
    query: torch.Tensor | None = None


def count_tail_rows(plan: StepPlan) -> int | None:
    """Return the number of padding rows after the last prompt; None without a whole prompt."""
    whole = whole_prompts(plan)
    return _padded(whole[-1]) - whole[-1] if whole else None


def append_tail(x: torch.Tensor, tail: int) -> torch.Tensor:
    """Return a copy of ``x`` [..., tokens, heads, dim] with ``tail`` rows of zeros appended."""
    return pad(x, (0, 0, 0, 0, 0, tail))


class EqualPrompts:
    """Decision on which equal prompts of a step are computed in one call.

    One call takes 1 to 3 % less of a step than separate calls. But it needs a plan for the unpadded
    length, which is the stride from one prompt to the next. Prompts are therefore joined only if
    they recur often: as in the ski rental problem, once separate calls have cost about as much as
    the plan.
    """

    def __init__(self) -> None:
        self._steps: Counter[tuple[int, int]] = Counter()

    def count_step(self, whole: tuple[int, ...]) -> frozenset[int]:
        """Count a step with whole prompts of lengths ``whole``. Return the lengths to join."""
        groups = {(rows, count) for rows, count in Counter(whole).items() if count > 1}
        if len(self._steps) > MAX_GROUPS:
            self._steps.clear()
        self._steps.update(groups)
        return frozenset(
            rows for rows, count in groups if self._steps[rows, count] > STEPS_UNTIL_JOINED
        )


def _groups(plan: StepPlan, window: int | None) -> list[tuple[int, int]]:
    """Return (length, count) of the prompts in each library call, in step order."""
    return [
        group
        for rows, equal in Counter(whole_prompts(plan, window)).items()
        for group in ([(rows, equal)] if rows in plan.joined else [(rows, 1)] * equal)
    ]


def count_fewest_rows(plan: StepPlan, window: int | None) -> int:
    """Return the number of rows in the smallest library call; 0 without a whole prompt."""
    return min((rows * count for rows, count in _groups(plan, window)), default=0)


def _causal(
    query: torch.Tensor, pairs: torch.Tensor, first: int, count: int, rows: int, scale: float
) -> torch.Tensor:
    """Return causal attention within each of ``count`` prompts of ``rows`` tokens, without a copy.

    The prompts begin at row ``first``. The result is [count, rows, heads, dim] of the model's
    dtype. The padding of a prompt is the rows that follow it; its own rows do not attend to them.
    The library keeps plans by shape and stride, so the stride of a single prompt is the padded
    length.
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
    """Yield the first row and the attention of each library call.

    The attention is [prompts, rows, heads, dim]; ``query`` is [tokens, heads, dim]. The rows of a
    prompt are contiguous, and a gap follows them.
    """
    groups = _groups(plan, window)
    if not groups:
        return
    rows_in_all = query.shape[0]
    first = rows_in_all - sum(rows * count for rows, count in groups)
    fresh: FreshRows = plan.derived
    tail = fresh.pairs.shape[1] - rows_in_all
    query = fresh.query if fresh.query is not None else append_tail(query, tail)
    for rows, count in groups:
        yield first, _causal(query, fresh.pairs, first, count, rows, scale)
        first += count * rows
