"""Attention of whole prompts by ``scaled_dot_product_attention`` of torch, called the library here.

The library reads the keys and values that the step has computed, instead of the KV pool.
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

# For a whole prompt. On an H200 at 4,000 rows and 128 dimensions, the library reaches 510 to 560
# TFLOP/s, and our kernel 359. Prompts of different lengths need a call and a copy each. For them,
# our kernel is faster up to 1,400 rows with 32 heads, and up to 2,500 rows with 16 heads.
MIN_LIBRARY_ROWS = 1536
# Prompts are padded, because the library makes a plan for each length.
PADDED_LENGTH_MULTIPLE = 256
# Steps with the same group of equally long prompts before one call computes the group. The plan for
# this call takes 45 ms on the host. One call for two prompts of 4,000 tokens saves 0.8 ms per step
# of a model with the shape of Qwen3-0.6B (H200). With the shape of Llama-3.1-8B, it saves 1.6 ms.
STEPS_UNTIL_JOINED = 32
MAX_COUNTED_PROMPT_GROUPS = 64
# The fastest first.
LIBRARY_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def get_whole_prompts(plan: StepPlan, window: int | None = None) -> tuple[int, ...]:
    """Return the lengths of the prompts that the library computes; empty for a ``window``."""
    return plan.fresh[bisect_left(plan.fresh, MIN_LIBRARY_ROWS) :] if window is None else ()


def list_padded_lengths(longest: int) -> list[int]:
    """Return all lengths to which prompts of up to ``longest`` tokens may be padded."""
    return list(
        range(_pad_length(MIN_LIBRARY_ROWS), _pad_length(longest) + 1, PADDED_LENGTH_MULTIPLE)
    )


@torch.inference_mode()
def create_library_plan(
    padded_length: int,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Make the library's plan for prompts of ``padded_length`` tokens, which takes 45 ms.

    Call it in the thread that runs the steps, because the library keeps plans per thread.
    """
    query = torch.zeros(padded_length, num_heads, dim, dtype=dtype, device=device)
    pairs = torch.zeros(2, padded_length, num_kv_heads, dim, dtype=dtype, device=device)
    with sdpa_kernel(LIBRARY_BACKENDS, set_priority=True):
        _attend_causally(query, pairs, 0, 1, padded_length, dim**-0.5)


def select_fastest_backend(plan: StepPlan) -> AbstractContextManager[None]:
    """Return a context manager in which the library uses its fastest backend for whole prompts.

    Enter it only once per step, because this takes as long as a kernel launch.
    """
    return (
        sdpa_kernel(LIBRARY_BACKENDS, set_priority=True)
        if get_whole_prompts(plan)
        else nullcontext()
    )


def _pad_length(num_rows: int) -> int:
    return -(-num_rows // PADDED_LENGTH_MULTIPLE) * PADDED_LENGTH_MULTIPLE


class FreshRows(NamedTuple):
    """Keys, values and queries of the step's tokens in one layer, in the model's dtype."""

    pairs: torch.Tensor  # [2, tokens + tail, kv heads, dim], the keys and the values
    # [tokens + tail, heads, dim]; None if the queries have no tail yet.
    query: torch.Tensor | None = None


def count_tail_rows(plan: StepPlan) -> int | None:
    """Return the number of padding rows after the last prompt; None without whole prompts."""
    whole = get_whole_prompts(plan)
    return _pad_length(whole[-1]) - whole[-1] if whole else None


def append_tail(x: torch.Tensor, tail: int) -> torch.Tensor:
    """Return a copy of ``x`` [..., tokens, heads, dim] with ``tail`` rows of zeros appended."""
    return pad(x, (0, 0, 0, 0, 0, tail))


class PromptJoinPolicy:
    """Decision which prompts of equal length are computed in one call.

    One call shortens a step by 1 to 3 %, but needs a plan for the unpadded length. Prompts are
    therefore joined after :data:`STEPS_UNTIL_JOINED` steps with the same group.
    """

    def __init__(self) -> None:
        self._steps: Counter[tuple[int, int]] = Counter()

    def count_step(self, whole_lengths: tuple[int, ...]) -> frozenset[int]:
        """Count a step with whole prompts of these lengths, and return the lengths to join."""
        groups = {(rows, count) for rows, count in Counter(whole_lengths).items() if count > 1}
        if len(self._steps) > MAX_COUNTED_PROMPT_GROUPS:
            self._steps.clear()
        self._steps.update(groups)
        return frozenset(
            rows for rows, count in groups if self._steps[rows, count] > STEPS_UNTIL_JOINED
        )


def _list_groups(plan: StepPlan, window: int | None) -> list[tuple[int, int]]:
    # (length, number of prompts) for each call of the library, in the step's order.
    return [
        group
        for rows, equal in Counter(get_whole_prompts(plan, window)).items()
        for group in ([(rows, equal)] if rows in plan.joined else [(rows, 1)] * equal)
    ]


def count_rows_of_smallest_call(plan: StepPlan, window: int | None) -> int:
    """Return the number of rows in the smallest call of the library; 0 without a call."""
    return min((rows * count for rows, count in _list_groups(plan, window)), default=0)


def _attend_causally(
    query: torch.Tensor,
    pairs: torch.Tensor,
    first_row: int,
    num_prompts: int,
    rows_per_prompt: int,
    scale: float,
) -> torch.Tensor:
    # The result is [``num_prompts``, ``rows_per_prompt``, heads, dim]. The rows after a prompt
    # serve as its padding, because its own rows do not attend to them. A single prompt has its
    # padded length as the stride, because the library keeps plans by shape and stride.
    def prompts(x: torch.Tensor) -> torch.Tensor:
        heads, dim = x.shape[1:]
        row, padded = heads * dim, _pad_length(rows_per_prompt)
        return x.as_strided(
            (num_prompts, heads, padded, dim),
            ((padded if num_prompts == 1 else rows_per_prompt) * row, dim, row, 1),
            x.storage_offset() + first_row * row,
        )

    attended = scaled_dot_product_attention(
        prompts(query), prompts(pairs[0]), prompts(pairs[1]),
        is_causal=True, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return attended[:, :, :rows_per_prompt].transpose(1, 2)


def attend_whole_prompts(
    query: torch.Tensor, plan: StepPlan, scale: float, window: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Compute the attention of all whole prompts in ``query`` [tokens, heads, dim].

    Yield the index of the first row and the result [prompts, rows, heads, dim] of each call of the
    library. Padding may separate the prompts in the result.
    """
    groups = _list_groups(plan, window)
    if not groups:
        return
    rows_in_all = query.shape[0]
    first = rows_in_all - sum(rows * count for rows, count in groups)
    fresh: FreshRows = plan.derived
    tail = fresh.pairs.shape[1] - rows_in_all
    query = fresh.query if fresh.query is not None else append_tail(query, tail)
    for rows, count in groups:
        yield first, _attend_causally(query, fresh.pairs, first, count, rows, scale)
        first += count * rows
