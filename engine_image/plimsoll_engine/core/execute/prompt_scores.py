"""Compute log probabilities of prompt tokens, for requests with ``prompt_logprobs``.

To score a row means to compute the log probability of the prompt token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import torch

from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.messages.worker_ipc import PromptScores

# Number of rows to score at a time, equal on all ranks. Their logits take 19 MiB with a vocabulary
# of 152,000 tokens.
MAX_SCORED_ROWS = 32


class ScoredRows(NamedTuple):
    """Rows of one request that a step scores."""

    request: Request
    row: int  # index of the first one in the step
    first: int  # index of its token in the request
    targets: Sequence[int]  # IDs of the tokens that follow the rows


@dataclass(slots=True)
class Scores:
    """Scores of the prompt tokens that follow each row."""

    chosen: torch.Tensor  # float32 [rows], their log probabilities
    ranks: torch.Tensor  # int32 [rows], their ranks in the vocabulary
    top_ids: torch.Tensor  # int32 [rows, largest requested number], the likeliest tokens
    top: torch.Tensor  # float32, their log probabilities

    def copy_to_host(self) -> Scores:
        """Return a copy in host memory, which is valid once the stream has completed it."""
        columns = self.chosen, self.ranks, self.top_ids, self.top
        return Scores(*(column.to("cpu", non_blocking=True) for column in columns))


@dataclass(slots=True)
class LaunchedScores:
    """Scores of a launched step.

    References to requests are weak, because a request may end before the step does.
    """

    # (request, position of the first scored token, number of scored tokens) for each request.
    parts: list[tuple[ref[Request], int, int]]
    scores: Scores

    def create_messages(self) -> list[PromptScores]:
        """Return a message for each request that still exists. The scores must be on the host."""
        found, row = [], 0
        for reference, first, count in self.parts:
            rows, row = slice(row, row + count), row + count
            request = reference()
            if request is None or request.released:
                continue
            request.scored = max(request.scored, first + count - 1)
            top_count = request.sampling.prompt_logprobs or 0
            found.append(
                PromptScores(
                    request.request_id,
                    request.attempt,
                    first,
                    _convert_to_bytes(self.scores.chosen[rows]),
                    _convert_to_bytes(self.scores.ranks[rows]),
                    _convert_to_bytes(self.scores.top_ids[rows, :top_count]),
                    _convert_to_bytes(self.scores.top[rows, :top_count]),
                )
            )
        return found


def _convert_to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())


def list_scored_rows(chunks: Sequence[Chunk]) -> list[ScoredRows]:
    """Return the rows that a step scores. ``chunks`` must be in the order of their rows."""
    found, start = [], 0
    for chunk in chunks:
        request = chunk.request
        if request.has_unscored_rows:
            first = max(request.computed, request.scored)
            end = min(request.computed + chunk.count, request.num_prompt - 1)
            if first < end:
                row = start + first - request.computed
                found.append(
                    ScoredRows(request, row, first, request.token_ids[first + 1 : end + 1])
                )
        start += chunk.rows
    return found


def compute_scores(
    compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor,
    targets: torch.Tensor, top_count: int,
) -> Scores:  # fmt: skip
    """Return the scores of the tokens ``targets`` int64 [rows], for ``hidden`` [rows, hidden].

    The scores include the ``top_count`` likeliest tokens of each row. Every rank must call this
    function for the same rows.
    """
    found = []
    for start in range(0, len(hidden), MAX_SCORED_ROWS):
        scores = compute_logits(hidden[start : start + MAX_SCORED_ROWS]).float().log_softmax(dim=-1)
        chosen = scores.gather(-1, targets[start : start + MAX_SCORED_ROWS, None])
        ranks = (scores > chosen).sum(dim=-1, dtype=torch.int32) + 1
        top, top_ids = scores.topk(top_count, dim=-1)
        found.append((chosen.squeeze(-1), ranks, top_ids.int(), top))
    return Scores(*(torch.cat(columns) for columns in zip(*found, strict=True)))
