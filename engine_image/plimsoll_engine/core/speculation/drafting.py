"""Speculative decoding: propose drafts of the next tokens, and verify them in one step.

A decode step with k drafts has k + 1 rows for the request. Each row is sampled as if the drafts
before it were output tokens. The first draft that differs from the sampled token is rejected, with
all later drafts. The accepted tokens are those that k + 1 single steps would have sampled.

This is rejection sampling in which the distribution q of a draft d has all its mass on d. A token x
is drawn from p, and the draft is accepted if x = d. Its probability of acceptance is thus p(d),
which is min(1, p/q). After a rejection, x has the distribution p without d, normalised, which is
the positive part of p - q. Output token i is always drawn with (seed, i), so a request has the same
text with any drafts, without drafts, and after any restart.

Drafts use the tokens, rows and blocks that a step has left. They never preempt or delay a request.
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

MAX_INDEXED_PER_STEP = 4096
"""Maximum number of tokens, over all requests, to index in one step. This takes milliseconds."""
MAX_MISSES = 3
"""Number of consecutive failed attempts after which a request pauses."""
MAX_PAUSE_STEPS = 16
"""Maximum pause in steps. During a pause, the request is processed as without drafts."""
GRAPH_ROWS = 256
"""Number of rows in a step above which an additional row is no longer almost free."""


class Proposer(Protocol):
    """Source of drafts. A wrong draft costs only time."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Sequence[list[int] | None]:
        """Return next tokens for each (request, maximum number of drafts).

        An empty list means that there is no proposal. None means that the draft model must first
        compute tokens of the request that it has missed. All tokens of the requests are known, and
        each request has a :class:`DraftingState` and the blocks for its drafts.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """:class:`Proposer` by prompt lookup, with matches of ``shortest`` to ``longest`` tokens."""

    shortest: int
    longest: int

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """Propose drafts, as in :class:`Proposer`, from the indexed part of each text."""
        budget, found = MAX_INDEXED_PER_STEP, []
        for request, most in wanted:
            drafting = request.drafting
            assert drafting is not None
            if drafting.index is None:
                drafting.index = NgramIndex(self.shortest, drafting.length)
            budget -= drafting.index.extend(request.token_ids, budget)
            found.append(drafting.index.propose(request.token_ids, self.longest, most))
        return found


@dataclass(slots=True)
class DraftCounts:
    """Counts since the worker started: verifications, verified drafts and accepted drafts."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Speculation:
    """Decides which requests get drafts, and how many.

    A request gets at most ``most`` drafts, and a step with drafts has at most ``rows`` rows.
    """

    def __init__(self, proposer: Proposer, most: int, rows: int) -> None:
        self.proposer = proposer
        self.most = most
        self.rows = rows
        self.counters = DraftCounts()
        self._steps = 0

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model; None if drafts do not come from a model."""
        return self.proposer if isinstance(self.proposer, DraftModel) else None

    def close(self) -> None:
        """Close the draft model. Idempotent."""
        if self.draft_model is not None:
            self.draft_model.close()

    def begin(self, request: Request, max_model_len: int) -> None:
        """Enable drafts for ``request``, unless it has a grammar or media."""
        if request.sampling.grammar is None and not request.media:
            request.drafting = DraftingState(min(request.max_length, max_model_len))

    def add(self, chunks: Sequence[Chunk], scheduler: Scheduler) -> None:
        """Add drafts to the decode rows in ``chunks``. ``chunks`` must be all chunks of a step."""
        self._steps += 1
        room = scheduler.max_num_batched_tokens - sum(chunk.count for chunk in chunks)
        room = min(room, self.rows - len(chunks))
        found = [(chunk, self._choose_draft_count(chunk)) for chunk in chunks]
        wanted = [(chunk, most) for chunk, most in found if most > 0]
        if room < 1:
            for chunk, _ in wanted:
                self._count_miss(chunk.request)
            return
        if not wanted:
            return
        share = max(1, room // len(wanted))
        asked = []
        for chunk, most in wanted:
            fitting = scheduler.reserve_drafts(chunk.request, min(most, share, room))
            asked.append((chunk.request, fitting))
            room -= fitting
        for (chunk, _), drafts in zip(wanted, self.proposer.propose(asked), strict=True):
            chunk.drafts = drafts or ()
            if drafts == []:
                self._count_miss(chunk.request)

    def _choose_draft_count(self, chunk: Chunk) -> int:
        """Return the maximum number of drafts for ``chunk``. Count down its pause."""
        request = chunk.request
        if (drafting := request.drafting) is None or chunk.count != 1 or not chunk.has_newest_token:
            return 0
        if drafting.pause:
            drafting.pause -= 1
            return 0
        if request.in_flight.tokens:
            return 0
        # The row after the last draft also yields a token.
        return min(self.most, drafting.length - len(request.token_ids) - 1)

    def count_verified(self, request: Request, drafts: int, accepted: int) -> None:
        """Count a verification of ``drafts`` drafts, of which ``accepted`` were accepted."""
        self.counters.drafts += 1
        self.counters.draft_tokens += drafts
        self.counters.accepted_tokens += accepted
        if request.drafting is None:
            return
        if request.drafting.computed:  # the draft model has not computed its last draft
            request.drafting.computed += min(accepted, drafts - 1)
        if accepted:
            request.drafting.misses = 0
        else:
            self._count_miss(request)

    def _count_miss(self, request: Request) -> None:
        drafting = request.drafting
        assert drafting is not None
        drafting.misses += 1
        if drafting.misses >= MAX_MISSES:
            # Pauses of equal length end in the same step: an attempt delays the whole batch.
            length = min(MAX_PAUSE_STEPS, 1 << (drafting.misses - MAX_MISSES + 1))
            drafting.pause = length - self._steps % length


def create_speculation(
    settings: Speculative | None, max_num_seqs: int, draft_model: DraftModel | None = None
) -> Speculation | None:
    """Return the speculation that ``settings`` configure; None if ``settings`` is None."""
    if settings is None:
        return None
    most = settings.num_speculative_tokens
    proposer = draft_model or NgramProposer(*settings.ngram_lengths)
    return Speculation(proposer, most, compute_max_rows(max_num_seqs, most))


def compute_max_rows(max_num_seqs: int, drafts: int) -> int:
    """Return the maximum number of rows of a decode step with ``drafts`` drafts per request."""
    return max(max_num_seqs, min(GRAPH_ROWS, max_num_seqs * (1 + drafts)))
