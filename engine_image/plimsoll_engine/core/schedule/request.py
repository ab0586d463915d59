"""One request in the worker, from its submission to its one release.

A finished request must die by reference counting alone: it holds tokens, block numbers and hashes,
and never a callable that holds the request. Whoever computes something about a request is a
function that is handed the request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from plimsoll_engine.core.execute.logit_edits import TokenCounts
from plimsoll_engine.core.execute.sampling import Row
from plimsoll_engine.core.grammar.matcher import Matcher
from plimsoll_engine.core.schedule.token_rules import banned, mask, reach
from plimsoll_engine.core.speculation.ngram import NgramIndex
from plimsoll_engine.messages.worker_ipc import Logprobs, Media, Sampling, Started, Submit

if TYPE_CHECKING:
    from plimsoll_engine.kvcache.block_pool import BlockPool
    from plimsoll_engine.models.lora import Adapter


TOKEN_TYPE = "i"
"""Of an array of tokens: a list takes ten times as much, and each choice of a prompt has its own.
"""


@dataclass(slots=True)
class Drafting:
    """What speculation knows of one request, which has at most ``length`` tokens.

    ``misses`` counts the looks since one brought an accepted draft; ``pause`` the steps until the
    next look. A draft model has ``computed`` of its tokens, and their first ``filled`` blocks are
    known to be full.
    """

    length: int
    index: NgramIndex | None = None
    misses: int = 0
    pause: int = 0
    computed: int = 0
    filled: int = 0

    @property
    def nbytes(self) -> int:
        """Host memory of the index."""
        return 0 if self.index is None else self.index.nbytes


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """One request in the worker.

    ``computed`` counts the tokens whose keys and values are in the pool. Times are monotonic
    seconds; ``cached_tokens`` and ``started_at`` are of the first start. ``order`` is the number in
    the order of arrival, ``place`` that of its place among those that run or were stopped; the
    queue gives both. ``fetched``: the prompt's beginning was looked for in host memory. ``pending``
    counts the tokens that are sampled and not yet in ``token_ids``, at most 1 when a step is
    scheduled: the device alone knows it, at ``sampled_row`` of the last step's. ``held`` is such a
    token once it is known, until the grammar has taken it in: no step may have the request
    meanwhile. ``drafting`` is None where no drafts are wanted. The frontend was told how likely the
    tokens after the first ``scored`` ones of the prompt were, where it asks for that. ``allowed``
    is the mask of the tokens that it allows, and its bad words look ``reach`` tokens back.
    """

    request_id: str
    token_ids: array[int]
    num_prompt: int
    sampling: Sampling
    counts: TokenCounts | None = None
    matcher: Matcher | None = None
    drafting: Drafting | None = None
    priority: int = 0
    tenant: str = ""
    order: int = 0
    place: int | None = None
    cache_salt: str = ""
    media: list[Media] = field(default_factory=list)
    adapter: Adapter | None = None
    arrived: float = 0.0
    deadline: float | None = None
    started_at: float | None = None
    started_told: bool = False
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    computed: int = 0
    pending: int = 0
    sampled_row: int = 0
    held: tuple[int, Logprobs | None] | None = None
    cached_tokens: int = 0
    scored: int = 0
    attempt: int = 0
    fetched: bool = False
    released: bool = False
    allowed: bytes | None = None
    reach: int = 0

    @classmethod
    def of(cls, submit: Submit) -> Request:
        """Return the request of a message; a carried one goes on after its ``output_ids``."""
        sampling, allowed = submit.sampling, submit.sampling.allowed_token_ids
        if allowed is not None:  # a list takes many times what the mask does
            sampling = msgspec.structs.replace(sampling, allowed_token_ids=None)
        return cls(
            request_id=submit.request_id,
            token_ids=array(TOKEN_TYPE, submit.prompt_ids + submit.output_ids),
            num_prompt=len(submit.prompt_ids),
            sampling=sampling,
            counts=TokenCounts.wanted(sampling, submit.prompt_ids, submit.output_ids),
            priority=submit.priority,
            tenant=submit.tenant,
            cache_salt=submit.cache_salt,
            media=submit.media,
            arrived=submit.arrived,
            deadline=None if submit.deadline_s is None else submit.arrived + submit.deadline_s,
            attempt=submit.attempt,
            allowed=None if allowed is None else mask(allowed),
            reach=reach(sampling.bad_words),
        )

    def append(self, token_id: int) -> None:
        """Take in the next token of the output."""
        self.pending = max(0, self.pending - 1)
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    def row(self, drafts: Sequence[int] = ()) -> Row:
        """Return what the next token's row of logits is to be sampled by.

        That after ``drafts``, as if they were the request's own tokens.
        """
        allowed = self.allowed if self.matcher is None else self.matcher.mask
        counts = self.counts
        if counts is not None and drafts:
            counts = counts.with_outputs(drafts)
        position = self.num_outputs + self.pending + len(drafts)
        return Row(self.sampling, position, counts, allowed, self._banned(drafts))

    def _banned(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return what would complete a bad word after the output and ``drafts``."""
        words = self.sampling.bad_words
        if not words:
            return ()
        begin = max(self.num_prompt, len(self.token_ids) - self.reach)
        return banned(words, [*self.token_ids[begin:], *drafts])

    def rows(self, drafts: Sequence[int]) -> list[Row]:
        """Return the rows of the next token and of the one after each draft."""
        return [self.row(drafts[:number]) for number in range(len(drafts) + 1)]

    @property
    def looks_back(self) -> bool:
        """Whether the next token depends on more than keys and values of those before it.

        Then none may be pending when it is sampled. Nor when drafts are to follow it.
        """
        if self.drafting is not None and not self.drafting.pause:
            return True
        return self.counts is not None or self.matcher is not None or self.reach > 0

    @property
    def unscored(self) -> bool:
        """Whether rows of its prompt must be computed for their log probabilities."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.num_prompt - 1

    @property
    def awaits_token(self) -> bool:
        """Whether its pending token must be known before its next step."""
        return self.pending > 0 and self.looks_back and self.held is None

    @property
    def num_outputs(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - self.num_prompt

    @property
    def uncomputed(self) -> int:
        """Tokens whose keys and values the next steps must compute, at least 1 while alive."""
        return len(self.token_ids) + self.pending - self.computed

    @property
    def max_length(self) -> int:
        """Prompt and output together when all of ``max_tokens`` are made."""
        return self.num_prompt + self.sampling.max_tokens

    def finish_reason(self, token_id: int, max_model_len: int) -> str | None:
        """Why the request ends after its newest token, or None where it goes on."""
        if not self.sampling.ignore_eos and token_id in self.sampling.stop_token_ids:
            return "stop"
        if self.matcher is not None and self.matcher.complete:
            return "stop"
        length = min(self.max_length, max_model_len)
        return "length" if len(self.token_ids) >= length else None

    def is_full(self, max_model_len: int) -> bool:
        """Whether the pending token is the last one that the request may have."""
        length = min(self.max_length, max_model_len)
        return len(self.token_ids) + self.pending >= length

    def take_started(self) -> Started | None:
        """How the request began: once, for its first token."""
        if self.started_at is None or self.started_told:
            return None
        self.started_told = True
        return Started(max(0.0, self.started_at - self.arrived), self.cached_tokens)

    def drop_blocks(self, pool: BlockPool) -> None:
        """Give the blocks back; what they held must be computed again (preemption)."""
        pool.release(self.block_ids)
        self.block_ids = []
        self.registered = self.computed = 0
        if self.drafting is not None:
            self.drafting.computed = self.drafting.filled = 0

    def release(self, pool: BlockPool) -> None:
        """End the request, whatever its outcome; a second call does nothing."""
        if self.released:
            return
        self.released = True
        self.drop_blocks(pool)
        self.block_hashes = []
        self.drafting = None
        self.media = []
        self.adapter = None
