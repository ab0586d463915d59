"""Request in the worker, from its submission to its release.

Reference counting alone must free a finished request. It therefore holds tokens, block numbers and
hashes, but no callable that references the request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from plimsoll_engine.core.grammar.matcher import Matcher
from plimsoll_engine.core.schedule.token_rules import (
    TokenCounts,
    count_bad_word_lookback,
    find_banned_tokens,
    make_mask,
)
from plimsoll_engine.core.speculation.ngram import NgramIndex
from plimsoll_engine.messages.worker_ipc import Logprobs, Media, Sampling, StartStatistics, Submit

if TYPE_CHECKING:
    from plimsoll_engine.kvcache.block_pool import BlockPool
    from plimsoll_engine.models.lora import Adapter


TOKEN_TYPE = "i"
"""Type code of token arrays.

A list would take ten times the memory. Each choice of a prompt has its own array.
"""


@dataclass(slots=True)
class DraftingState:
    """State of speculative decoding for one request of at most ``length`` tokens.

    ``misses`` counts the attempts since the last accepted draft, and ``pause`` the steps until the
    next attempt. The draft model has computed the first ``computed`` tokens and filled the first
    ``filled`` blocks.
    """

    length: int
    index: NgramIndex | None = None
    misses: int = 0
    pause: int = 0
    computed: int = 0
    filled: int = 0

    @property
    def nbytes(self) -> int:
        """Host memory of the index in bytes."""
        return 0 if self.index is None else self.index.nbytes


@dataclass(slots=True)
class InFlight:
    """Sampled tokens of one request that are not part of its output yet.

    ``tokens`` is their number. When a step is scheduled, it is at most 1: only the device knows the
    token, in ``row`` of the last step. ``unconfirmed`` is a token that the host knows and the
    grammar has not accepted yet; until then, the request joins no step.
    """

    tokens: int = 0
    row: int = 0
    unconfirmed: tuple[int, Logprobs | None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the output contains all sampled tokens."""
        return not self.tokens and self.unconfirmed is None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """One request in the worker. Times are monotonic seconds.

    - ``computed``: number of tokens whose keys and values are in the pool.
    - ``cached_tokens``, ``started_at``: prefix-cache hits and time of the first start.
    - ``order``: position in the order of arrival. ``place``: position among running and preempted
      requests. The waiting queue assigns both.
    - ``registered``: number of blocks that are registered in the prefix cache.
    - ``fetched``: whether host memory was searched for the prompt's first blocks.
    - ``in_flight``: sampled tokens that are not yet in ``token_ids``.
    - ``drafting``: None if the request gets no drafts.
    - ``scored``: number of prompt tokens whose log probabilities were sent, if requested.
    - ``allowed``: mask of the tokens that the request allows.
    - ``bad_word_lookback``: number of preceding tokens that the bad words depend on.
    """

    request_id: str
    token_ids: array[int]
    num_prompt: int
    sampling: Sampling
    counts: TokenCounts | None = None
    matcher: Matcher | None = None
    drafting: DraftingState | None = None
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
    start_reported: bool = False
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    computed: int = 0
    in_flight: InFlight = field(default_factory=InFlight)
    cached_tokens: int = 0
    scored: int = 0
    attempt: int = 0
    fetched: bool = False
    released: bool = False
    allowed: bytes | None = None
    bad_word_lookback: int = 0

    @classmethod
    def create(cls, submit: Submit) -> Request:
        """Return the request in ``submit``. If carried over, it continues after ``output_ids``."""
        sampling, allowed = submit.sampling, submit.sampling.allowed_token_ids
        if allowed is not None:  # a list takes many times the memory of the mask
            sampling = msgspec.structs.replace(sampling, allowed_token_ids=None)
        return cls(
            request_id=submit.request_id,
            token_ids=array(TOKEN_TYPE, submit.prompt_ids + submit.output_ids),
            num_prompt=len(submit.prompt_ids),
            sampling=sampling,
            counts=TokenCounts.create_if_needed(sampling, submit.prompt_ids, submit.output_ids),
            priority=submit.priority,
            tenant=submit.tenant,
            cache_salt=submit.cache_salt,
            media=submit.media,
            arrived=submit.arrived,
            deadline=None if submit.deadline_s is None else submit.arrived + submit.deadline_s,
            attempt=submit.attempt,
            allowed=None if allowed is None else make_mask(allowed),
            bad_word_lookback=count_bad_word_lookback(sampling.bad_words),
        )

    def append(self, token_id: int) -> None:
        """Append the next output token."""
        self.in_flight.tokens = max(0, self.in_flight.tokens - 1)
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    def find_banned(self, drafts: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the tokens that would complete a bad word after the output and ``drafts``."""
        words = self.sampling.bad_words
        if not words:
            return ()
        begin = max(self.num_prompt, len(self.token_ids) - self.bad_word_lookback)
        return find_banned_tokens(words, [*self.token_ids[begin:], *drafts])

    @property
    def needs_previous_token(self) -> bool:
        """Whether the host must know the previous token before the next token is sampled.

        Penalties, grammars, bad words and drafts depend on it.
        """
        if self.drafting is not None and not self.drafting.pause:
            return True
        return self.counts is not None or self.matcher is not None or self.bad_word_lookback > 0

    @property
    def has_unscored_rows(self) -> bool:
        """Whether log probabilities of prompt rows are not computed yet."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.num_prompt - 1

    @property
    def awaits_token(self) -> bool:
        """Whether the next step must wait for the pending token."""
        return (
            self.in_flight.tokens > 0
            and self.needs_previous_token
            and self.in_flight.unconfirmed is None
        )

    @property
    def num_outputs(self) -> int:
        """Number of output tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose keys and values are not computed yet; at least 1."""
        return len(self.token_ids) + self.in_flight.tokens - self.computed

    @property
    def max_length(self) -> int:
        """Number of prompt and output tokens if the output reaches ``max_tokens``."""
        return self.num_prompt + self.sampling.max_tokens

    def get_finish_reason(self, token_id: int, max_model_len: int) -> str | None:
        """Return the reason why the request ends after its newest token; None if it continues."""
        if not self.sampling.ignore_eos and token_id in self.sampling.stop_token_ids:
            return "stop"
        if self.matcher is not None and self.matcher.complete:
            return "stop"
        length = min(self.max_length, max_model_len)
        return "length" if len(self.token_ids) >= length else None

    def is_full(self, max_model_len: int) -> bool:
        """Report whether the pending token is the last token that the request may have."""
        length = min(self.max_length, max_model_len)
        return len(self.token_ids) + self.in_flight.tokens >= length

    def take_start_statistics(self) -> StartStatistics | None:
        """Return the statistics of the request's start once; None before and afterwards."""
        if self.started_at is None or self.start_reported:
            return None
        self.start_reported = True
        return StartStatistics(max(0.0, self.started_at - self.arrived), self.cached_tokens)

    def drop_blocks(self, pool: BlockPool) -> None:
        """Release the blocks, as in a preemption. Their tokens must be computed again."""
        pool.release(self.block_ids)
        self.block_ids = []
        self.registered = self.computed = 0
        if self.drafting is not None:
            self.drafting.computed = self.drafting.filled = 0

    def release(self, pool: BlockPool) -> None:
        """Release everything that the request holds. Idempotent."""
        if self.released:
            return
        self.released = True
        self.drop_blocks(pool)
        self.block_hashes = []
        self.drafting = None
        self.media = []
        self.adapter = None
