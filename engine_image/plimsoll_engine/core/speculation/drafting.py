"""Propose drafts of the next tokens for speculative decoding.

A decode step with k drafts has k + 1 rows for the request. The first draft that differs from the
sampled token is rejected, with all drafts after it, so the output is the same as without drafts.
Drafts use only what a step has left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plimsoll_engine.core.schedule.request import DraftingState, Request
from plimsoll_engine.core.schedule.scheduler import Chunk, Scheduler
from plimsoll_engine.core.speculation.draft_model import DraftModel
from plimsoll_engine.core.speculation.ngram import NgramIndex
from plimsoll_engine.messages.speculative import Speculative

# Over all requests. Indexing them takes milliseconds.
MAX_INDEXED_TOKENS_PER_STEP = 4096
# Number of consecutive attempts without an accepted draft.
MAX_MISSES_BEFORE_PAUSE = 3
MAX_PAUSE_STEPS = 16
# More rows would slow down a decode step.
MAX_SPECULATIVE_ROWS = 256


class Proposer(Protocol):
    """Source of drafts. Wrong drafts only cost time."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> Sequence[list[int] | None]:
        """Return drafts for each pair (request, maximum number of drafts).

        They are an empty list if there is no proposal, and None if a draft model must first compute
        missed tokens. The host must know all tokens of each request.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Proposer that finds earlier occurrences of the last tokens in the request's text.

    A match has ``shortest`` to ``longest`` tokens.
    """

    shortest: int
    longest: int

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """Return drafts, as :class:`Proposer` requires, from the indexed part of each text."""
        budget, found = MAX_INDEXED_TOKENS_PER_STEP, []
        for request, limit in draft_limits:
            drafting = request.drafting
            assert drafting is not None
            if drafting.index is None:
                drafting.index = NgramIndex(self.shortest, drafting.length)
            budget -= drafting.index.extend(request.token_ids, budget)
            found.append(drafting.index.propose(request.token_ids, self.longest, limit))
        return found


@dataclass(slots=True)
class DraftCounts:
    """Counts since the worker started."""

    drafts: int = 0  # verifications
    draft_tokens: int = 0  # verified draft tokens
    accepted_tokens: int = 0  # accepted draft tokens


class Speculation:
    """Selection of the requests that get drafts, and of the number of their drafts."""

    def __init__(self, proposer: Proposer, max_drafts: int, max_rows: int) -> None:
        self.proposer = proposer
        self.max_drafts = max_drafts  # of a request in a step
        self.max_rows = max_rows  # of a step with drafts
        self.counters = DraftCounts()
        self._steps = 0

    @property
    def draft_model(self) -> DraftModel | None:
        """Draft model; None for prompt lookup."""
        return self.proposer if isinstance(self.proposer, DraftModel) else None

    def close(self) -> None:
        """Close the draft model, if any. Idempotent."""
        if self.draft_model is not None:
            self.draft_model.close()

    def enable_drafts(self, request: Request, max_model_len: int) -> None:
        """Enable drafts for ``request``, unless it has a grammar or media."""
        if request.sampling.grammar is None and not request.media:
            request.drafting = DraftingState(min(request.max_length, max_model_len))

    def add_drafts(self, chunks: Sequence[Chunk], scheduler: Scheduler) -> None:
        """Add drafts to the decode rows in ``chunks``, which must be all chunks of a step."""
        self._steps += 1
        room = scheduler.max_num_batched_tokens - sum(chunk.count for chunk in chunks)
        room = min(room, self.max_rows - len(chunks))
        limits = [(chunk, self._choose_draft_count(chunk)) for chunk in chunks]
        drafted = [(chunk, limit) for chunk, limit in limits if limit > 0]
        if room < 1:
            for chunk, _ in drafted:
                self._count_miss(chunk.request)
            return
        if not drafted:
            return
        share = max(1, room // len(drafted))
        draft_limits = []
        for chunk, limit in drafted:
            fitting = scheduler.reserve_drafts(chunk.request, min(limit, share, room))
            draft_limits.append((chunk.request, fitting))
            room -= fitting
        for (chunk, _), drafts in zip(drafted, self.proposer.propose(draft_limits), strict=True):
            chunk.drafts = drafts or ()
            if drafts == []:
                self._count_miss(chunk.request)

    def _choose_draft_count(self, chunk: Chunk) -> int:
        # Also counts down the pause of the request.
        request = chunk.request
        if (drafting := request.drafting) is None or chunk.count != 1 or not chunk.has_newest_token:
            return 0
        if drafting.pause:
            drafting.pause -= 1
            return 0
        if request.in_flight.tokens:
            return 0
        # The row after the last draft also yields a token.
        return min(self.max_drafts, drafting.length - len(request.token_ids) - 1)

    def record_verified_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count ``num_drafts`` verified drafts, of which ``num_accepted`` were accepted."""
        self.counters.drafts += 1
        self.counters.draft_tokens += num_drafts
        self.counters.accepted_tokens += num_accepted
        if request.drafting is None:
            return
        if request.drafting.computed:  # the draft model has not computed its last draft
            request.drafting.computed += min(num_accepted, num_drafts - 1)
        if num_accepted:
            request.drafting.misses = 0
        else:
            self._count_miss(request)

    def _count_miss(self, request: Request) -> None:
        drafting = request.drafting
        assert drafting is not None
        drafting.misses += 1
        if drafting.misses >= MAX_MISSES_BEFORE_PAUSE:
            # Pauses of equal length end in the same step: an attempt delays the whole batch.
            length = min(MAX_PAUSE_STEPS, 1 << (drafting.misses - MAX_MISSES_BEFORE_PAUSE + 1))
            drafting.pause = length - self._steps % length


def create_speculation(
    settings: Speculative | None, max_num_seqs: int, draft_model: DraftModel | None = None
) -> Speculation | None:
    """Return the :class:`Speculation` for ``settings``; None if ``settings`` is None."""
    if settings is None:
        return None
    max_drafts = settings.num_speculative_tokens
    proposer = draft_model or NgramProposer(*settings.ngram_lengths)
    return Speculation(proposer, max_drafts, compute_max_rows(max_num_seqs, max_drafts))


def compute_max_rows(max_num_seqs: int, max_drafts: int) -> int:
    """Return the maximum number of rows in a decode step with drafts."""
    return max(max_num_seqs, min(MAX_SPECULATIVE_ROWS, max_num_seqs * (1 + max_drafts)))
