"""Create drafts with a smaller model that has the same tokenizer.

Its KV pool has as many blocks as the target model's, and block b contains the same tokens in both.
Both models draw a token with the same seed and position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.inputs import collect_inputs, get_row_order
from plimsoll_engine.core.execute.sampling import SamplingRow, plan_sampling, sample
from plimsoll_engine.core.schedule.request import DraftingState, InFlight, Request
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.messages.worker_ipc import Sampling

# More missed tokens form a prefill chunk.
MAX_CATCH_UP_ROWS = 8


@dataclass(slots=True)
class _RequestView:
    # ``computed`` is the number of tokens that the draft model has computed.
    token_ids: array[int]
    block_ids: list[int]
    computed: int
    in_flight: InFlight


@dataclass(slots=True)
class _Rows:
    request: _RequestView
    count: int
    has_newest_token: bool
    drafts: Sequence[int] = ()


class _CatchUp(NamedTuple):
    number: int
    request: Request
    chunk: _Rows
    end: int  # index up to which the draft model must compute tokens before it can draft


@dataclass(slots=True)
class _DrawnDrafts:
    # A token per row, on the device, and the index of each row's request.
    numbers: list[int]
    tokens: torch.Tensor


class DraftModel:
    """Proposer that runs a draft model.

    ``pool`` is the block pool of the target model, and ``max_tokens`` the maximum number of tokens
    in a step.
    """

    def __init__(
        self,
        forward: Forward,
        pool: BlockPool,
        max_tokens: int,
        target_vocabulary: int,
        draft_vocabulary: int,
    ) -> None:
        self.forward = forward
        self._pool = pool
        self._max_tokens = max_tokens
        self._target_vocabulary = target_vocabulary
        self._draft_vocabulary = draft_vocabulary
        # Allocation count that each block had when the draft model last computed all its tokens. If
        # the pool's count differs, the block now has other tokens.
        self._filled = array("Q", [0]) * pool.num_blocks

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> list[list[int] | None]:
        """Return drafts, as :class:`Proposer` requires; None for requests with missed tokens."""
        found: list[list[int] | None] = [None for _ in draft_limits]
        steps = self._create_drafts(draft_limits)
        if not steps:
            return found
        tokens = torch.cat([step.tokens for step in steps]).tolist()
        ends = np.cumsum([0, *(len(step.numbers) for step in steps)]).tolist()
        for step, (begin, end) in zip(steps, pairwise(ends), strict=True):
            for number, token in zip(step.numbers, tokens[begin:end], strict=True):
                found[number] = [*(found[number] or ()), max(0, token)]
        return found

    @torch.inference_mode()
    def _create_drafts(self, draft_limits: Sequence[tuple[Request, int]]) -> list[_DrawnDrafts]:
        drawn = self._catch_up(draft_limits)
        steps = []
        num_drafts = 1
        while drawn is not None:
            steps.append(drawn)
            self.forward.newest = drawn.tokens
            rows = [
                (row, number)
                for row, number in enumerate(drawn.numbers)
                if draft_limits[number][1] > num_drafts
            ]
            drawn = self._draw_next(draft_limits, rows, num_drafts) if rows else None
            num_drafts += 1
        self.forward.newest = None
        return steps

    def _catch_up(self, draft_limits: Sequence[tuple[Request, int]]) -> _DrawnDrafts | None:
        behind = self._list_catch_ups(draft_limits)
        if not behind:
            return None
        behind.sort(key=lambda one: get_row_order(one.chunk))
        chunks = [one.chunk for one in behind]
        inputs = collect_inputs(chunks, self._pool.block_size)
        ending = [one for one in behind if one.chunk.has_newest_token]
        last = np.cumsum([1 + len(one.chunk.drafts) for one in ending]) - 1
        drawn = self._draw(inputs, [(one.number, one.request) for one in ending], 0, last.tolist())
        for one in behind:
            drafting = one.request.drafting
            assert drafting is not None
            drafting.computed = one.end
            self._mark_filled(one.request, drafting)
        return drawn

    def _list_catch_ups(self, draft_limits: Sequence[tuple[Request, int]]) -> list[_CatchUp]:
        left, found = self._max_tokens, []
        for number, (request, most) in enumerate(draft_limits):
            drafting = request.drafting
            assert drafting is not None
            if not most or not left:
                continue
            begin = drafting.computed or self._count_shared_tokens(request)
            end = len(request.token_ids)
            if end - begin <= min(MAX_CATCH_UP_ROWS, left):
                unseen = request.token_ids[begin + 1 : end]
                chunk = _Rows(_create_request_view(request, begin), 1, True, unseen)
            else:
                end = min(end, begin + left)
                whole = end == len(request.token_ids)
                chunk = _Rows(_create_request_view(request, begin), end - begin, whole)
            left -= end - begin
            found.append(_CatchUp(number, request, chunk, end))
        return found

    def _draw_next(
        self,
        draft_limits: Sequence[tuple[Request, int]],
        rows: list[tuple[int, int]],
        num_drafts: int,
    ) -> _DrawnDrafts | None:
        # ``rows`` are pairs (row of the last draft, index of the request in ``draft_limits``). The
        # last draft is only on the device.
        chunks, requests = [], []
        for row, number in rows:
            request = draft_limits[number][0]
            seen = _create_request_view(
                request, len(request.token_ids) + num_drafts - 1, InFlight(1, row)
            )
            chunks.append(_Rows(seen, 1, has_newest_token=True))
            requests.append((number, request))
        inputs = collect_inputs(chunks, self._pool.block_size)
        return self._draw(inputs, requests, num_drafts, list(range(len(rows))))

    def _draw(
        self,
        inputs: Inputs,
        requests: list[tuple[int, Request]],
        num_drafts: int,
        last_rows: list[int],
    ) -> _DrawnDrafts | None:
        # ``requests`` are pairs (index, request), and ``last_rows`` the row after which to draw for
        # each of them.
        np.minimum(inputs.ids, self._draft_vocabulary - 1, out=inputs.ids)
        tokens, logits = self.forward.compute(inputs)
        if logits is None:
            return None
        sampling_plan = plan_sampling(
            [
                SamplingRow(
                    _copy_sampling_without_logprobs(request), request.num_outputs + num_drafts
                )
                for _, request in requests
            ]
        )
        whole = len(last_rows) == len(logits)
        if (
            tokens is None
            or not sampling_plan.is_greedy
            or logits.shape[-1] > self._target_vocabulary
        ):
            chosen = logits if whole else logits[last_rows]
            tokens = sample(chosen[:, : self._target_vocabulary].contiguous(), sampling_plan).tokens
        else:
            # The tokens are in the graph's memory, which the next replay overwrites.
            tokens = tokens.clone() if whole else tokens[last_rows]
        return _DrawnDrafts([number for number, _ in requests], tokens)

    def _count_shared_tokens(self, request: Request) -> int:
        # Counts the first tokens that were computed for other requests.
        size, allocation_counts = self._pool.block_size, self._pool.allocation_counts
        blocks = 0
        for block in request.block_ids[: (len(request.token_ids) - 1) // size]:
            if self._filled[block] != allocation_counts[block]:
                break
            blocks += 1
        return blocks * size

    def _mark_filled(self, request: Request, drafting: DraftingState) -> None:
        full = drafting.computed // self._pool.block_size
        for block in request.block_ids[drafting.filled : full]:
            self._filled[block] = self._pool.allocation_counts[block]
        drafting.filled = full

    def close(self) -> None:
        """Close the model, its KV pool and its graphs. Idempotent."""
        self.forward.close()


def _create_request_view(
    request: Request, computed: int, in_flight: InFlight | None = None
) -> _RequestView:
    return _RequestView(request.token_ids, request.block_ids, computed, in_flight or InFlight())


def _copy_sampling_without_logprobs(request: Request) -> Sampling:
    sampling = request.sampling
    return (
        sampling if sampling.logprobs is None else msgspec.structs.replace(sampling, logprobs=None)
    )
