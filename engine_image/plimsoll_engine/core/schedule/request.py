"""State of a request in the worker, from its submission to its release.

Reference counting alone must free a request that has ended, so no attribute may refer back to it.
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
    make_token_mask,
)
from plimsoll_engine.core.speculation.ngram import NgramIndex
from plimsoll_engine.messages.worker_ipc import (
    FirstTokenStatistics,
    Logprobs,
    Media,
    Sampling,
    Submit,
)

if TYPE_CHECKING:
    from plimsoll_engine.kvcache.block_pool import BlockPool
    from plimsoll_engine.models.lora import Adapter


# int32. A list would take ten times the memory.
TOKEN_TYPE_CODE = "i"


@dataclass(slots=True)
class DraftingState:
    """State of speculative decoding for one request."""

    length: int  # maximum number of prompt and output tokens
    index: NgramIndex | None = None
    misses: int = 0  # attempts since the last accepted draft
    pause: int = 0  # steps until the next attempt
    computed: int = 0  # tokens that the draft model has computed
    filled: int = 0  # blocks of which the draft model has computed all tokens

    @property
    def nbytes(self) -> int:
        """Host memory of the n-gram index, in bytes; 0 without an index."""
        return 0 if self.index is None else self.index.nbytes


@dataclass(slots=True)
class InFlight:
    """Sampled tokens of a request that its output does not contain yet."""

    tokens: int = 0  # Their number, at most 1 when a step is scheduled.
    row: int = 0  # Of the last step, which has the token on the device until the host has read it.
    # Token that the grammar has not accepted yet.
    unconfirmed: tuple[int, Logprobs | None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the output contains all sampled tokens."""
        return not self.tokens and self.unconfirmed is None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """Request in the worker. Times are in seconds of CLOCK_MONOTONIC."""

    request_id: str
    token_ids: array[int]
    num_prompt: int
    sampling: Sampling
    counts: TokenCounts | None = None
    matcher: Matcher | None = None
    drafting: DraftingState | None = None  # None if the request gets no drafts
    priority: int = 0
    tenant: str = ""
    order: int = 0  # position in the order of arrival
    place: int | None = None  # position among running and preempted requests
    cache_salt: str = ""
    media: list[Media] = field(default_factory=list)
    adapter: Adapter | None = None
    arrived: float = 0.0
    deadline: float | None = None
    started_at: float | None = None  # time of the first start
    start_reported: bool = False
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    registered: int = 0  # blocks that are registered in the prefix cache
    computed: int = 0  # tokens whose keys and values are in the KV pool
    # Sampled tokens that are not in token_ids yet.
    in_flight: InFlight = field(default_factory=InFlight)
    cached_tokens: int = 0  # prompt tokens that the prefix cache had at the first start
    scored: int = 0  # prompt tokens whose log probabilities have been sent
    attempt: int = 0
    fetched: bool = False  # whether host memory has been searched for the prompt's blocks
    released: bool = False
    allowed: bytes | None = None  # bit mask of the tokens that may be sampled; None for all
    bad_word_lookback: int = 0  # preceding tokens on which the bad words depend

    @classmethod
    def create(cls, submit: Submit) -> Request:
        """Return the request in ``submit``. A carried-over request continues after its output."""
        sampling, allowed = submit.sampling, submit.sampling.allowed_token_ids
        if allowed is not None:  # a list takes many times the memory of the mask
            sampling = msgspec.structs.replace(sampling, allowed_token_ids=None)
        return cls(
            request_id=submit.request_id,
            token_ids=array(TOKEN_TYPE_CODE, submit.prompt_ids + submit.output_ids),
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
            allowed=None if allowed is None else make_token_mask(allowed),
            bad_word_lookback=count_bad_word_lookback(sampling.bad_words),
        )

    def append(self, token_id: int) -> None:
        """Append the next output token."""
        self.in_flight.tokens = max(0, self.in_flight.tokens - 1)
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    def list_banned_tokens(self, drafts: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the tokens that would complete a bad word after the output and ``drafts``."""
        words = self.sampling.bad_words
        if not words:
            return ()
        begin = max(self.num_prompt, len(self.token_ids) - self.bad_word_lookback)
        return find_banned_tokens(words, [*self.token_ids[begin:], *drafts])

    @property
    def needs_previous_token(self) -> bool:
        """Whether the host must know each token before the next one is sampled.

        Penalties, grammars, bad words and drafts require this.
        """
        if self.drafting is not None and not self.drafting.pause:
            return True
        return self.counts is not None or self.matcher is not None or self.bad_word_lookback > 0

    @property
    def has_unscored_rows(self) -> bool:
        """Whether log probabilities of prompt tokens are requested and not all computed yet."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.num_prompt - 1

    @property
    def awaits_token(self) -> bool:
        """Whether the request can join a step only after the host has read its pending token."""
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
        """Number of tokens whose keys and values must still be computed; at least 1."""
        return len(self.token_ids) + self.in_flight.tokens - self.computed

    @property
    def max_length(self) -> int:
        """Maximum number of prompt and output tokens."""
        return self.num_prompt + self.sampling.max_tokens

    def get_finish_reason(self, token_id: int, max_model_len: int) -> str | None:
        """Return the finish reason if ``token_id`` is the last token, otherwise None."""
        if not self.sampling.ignore_eos and token_id in self.sampling.stop_token_ids:
            return "stop"
        if self.matcher is not None and self.matcher.complete:
            return "stop"
        length = min(self.max_length, max_model_len)
        return "length" if len(self.token_ids) >= length else None

    def is_full(self, max_model_len: int) -> bool:
        """Report whether the pending token is the last that the request may have."""
        length = min(self.max_length, max_model_len)
        return len(self.token_ids) + self.in_flight.tokens >= length

    def take_start_statistics(self) -> FirstTokenStatistics | None:
        """Return the statistics of the first start. Return None before it, and on later calls."""
        if self.started_at is None or self.start_reported:
            return None
        self.start_reported = True
        return FirstTokenStatistics(max(0.0, self.started_at - self.arrived), self.cached_tokens)

    def drop_blocks(self, pool: BlockPool) -> None:
        """Release all blocks of the request. Its tokens must then be computed again."""
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
