"""Speculative decoding: drafts of a request's next tokens, verified by one step.

A decode step with k drafts has k + 1 rows for the request, and each row is sampled as if the tokens
before it were the request's own. The first draft that is not what its row says ends the rest: the
tokens taken in are those that k + 1 steps would have made one by one.

That is rejection sampling with drafts as point masses. Drawing x from p and taking the draft d if
x = d accepts it with probability p(d), and otherwise leaves p without d, normalised: min(1, p/q)
and the positive part of p - q. Since row i draws by (seed, i) as ever, a request has one text with
any drafts, with none, and over any restart.

Drafts take what a step has left of tokens, rows and blocks. They stop nobody and delay nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plimsoll_engine.core.schedule.request import Drafting, Request
from plimsoll_engine.core.schedule.scheduler import Chunk, Scheduler
from plimsoll_engine.core.speculation.draft_model import DraftModel
from plimsoll_engine.core.speculation.ngram import NgramIndex
from plimsoll_engine.messages.speculative import Speculative

INDEXED_AT_ONCE = 4096
"""Tokens that the index of all requests together takes in during a step: some milliseconds."""
PATIENCE = 3
"""So many looks in a row may bring nothing."""
LONGEST_PAUSE = 16
"""Steps. While a request pauses, its steps are launched ahead of its tokens, as without drafts."""
GRAPH_ROWS = 256
"""A step with more rows than that computes: another row is no longer almost free."""


class Proposer(Protocol):
    """Guesses. A wrong one costs time alone."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Sequence[list[int] | None]:
        """Return at most so many next tokens for each request: [] for no idea, None for not yet.

        All tokens of the requests are known, and each has its :class:`Drafting` and the blocks for
        so many drafts.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Prompt lookup by runs of ``shortest`` to ``longest`` tokens."""

    shortest: int
    longest: int

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """As :class:`Proposer`; of a long prompt, from the part that is indexed by now."""
        budget, found = INDEXED_AT_ONCE, []
        for request, most in wanted:
            drafting = request.drafting
            assert drafting is not None
            if drafting.index is None:
                drafting.index = NgramIndex(self.shortest, drafting.length)
            budget -= drafting.index.extend(request.token_ids, budget)
            found.append(drafting.index.propose(request.token_ids, self.longest, most))
        return found


@dataclass(slots=True)
class Drafted:
    """Counts since this worker started: looks that brought drafts, the drafts, those accepted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Speculation:
    """Who gets drafts, and how many. ``rows`` are the most of a step that has any."""

    def __init__(self, proposer: Proposer, most: int, rows: int) -> None:
        self.proposer = proposer
        self.most = most
        self.rows = rows
        self.counters = Drafted()
        self._steps = 0

    @property
    def draft_model(self) -> DraftModel | None:
        """The model that guesses, if one does."""
        return self.proposer if isinstance(self.proposer, DraftModel) else None

    def close(self) -> None:
        """Let go of the draft model. Again does nothing more."""
        if self.draft_model is not None:
            self.draft_model.close()

    def begin(self, request: Request, max_model_len: int) -> None:
        """Let ``request`` have drafts: not where a grammar or media decide on its tokens too."""
        if request.sampling.grammar is None and not request.media:
            request.drafting = Drafting(min(request.max_length, max_model_len))

    def add(self, chunks: Sequence[Chunk], scheduler: Scheduler) -> None:
        """Give drafts to the decode rows among ``chunks``, the whole of a step."""
        self._steps += 1
        room = scheduler.max_num_batched_tokens - sum(chunk.count for chunk in chunks)
        room = min(room, self.rows - len(chunks))
        found = [(chunk, self._wanted(chunk)) for chunk in chunks]
        wanted = [(chunk, most) for chunk, most in found if most > 0]
        if room < 1:
            for chunk, _ in wanted:
                self._missed(chunk.request)
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
                self._missed(chunk.request)

    def _wanted(self, chunk: Chunk) -> int:
        """Return how many drafts ``chunk`` may have."""
        request = chunk.request
        if (drafting := request.drafting) is None or chunk.count != 1 or not chunk.ends:
            return 0
        if drafting.pause:
            drafting.pause -= 1
            return 0
        if request.pending:
            return 0
        # The row after the last draft brings a token as well.
        return min(self.most, drafting.length - len(request.token_ids) - 1)

    def verified(self, request: Request, drafts: int, accepted: int) -> None:
        """Note that a step has verified so many drafts of ``request``."""
        self.counters.drafts += 1
        self.counters.draft_tokens += drafts
        self.counters.accepted_tokens += accepted
        if request.drafting is None:
            return
        if request.drafting.computed:  # the last draft is not among what a draft model computes
            request.drafting.computed += min(accepted, drafts - 1)
        if accepted:
            request.drafting.misses = 0
        else:
            self._missed(request)

    def _missed(self, request: Request) -> None:
        drafting = request.drafting
        assert drafting is not None
        drafting.misses += 1
        if drafting.misses >= PATIENCE:
            # All pauses of a length end in one step: each look makes the whole batch wait for it.
            length = min(LONGEST_PAUSE, 1 << (drafting.misses - PATIENCE + 1))
            drafting.pause = length - self._steps % length


def of_settings(
    settings: Speculative | None, max_num_seqs: int, draft_model: DraftModel | None = None
) -> Speculation | None:
    """Return what ``settings`` ask for, if anything; ``draft_model`` is of that method."""
    if settings is None:
        return None
    most = settings.num_speculative_tokens
    proposer = draft_model or NgramProposer(*settings.lookup)
    return Speculation(proposer, most, rows(max_num_seqs, most))


def rows(max_num_seqs: int, drafts: int) -> int:
    """Return the most rows of a decode step for requests with so many drafts each."""
    return max(max_num_seqs, min(GRAPH_ROWS, max_num_seqs * (1 + drafts)))


def taken(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of ``tokens``, one for each draft and one more, are the request's own.

    Each needs that the draft before it is what was sampled in its place.
    """
    for number, (draft, token) in enumerate(zip(drafts, tokens, strict=False)):
        if draft != token:
            return number + 1
    return len(tokens)
