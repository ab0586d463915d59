"""Select the tokens of the next step: continuous batching with chunked prefill.

Running requests come first, then waiting requests, by place (see waiting.py). When blocks run out,
the last running request is preempted: it releases its blocks and waits. Priorities apply only
between requests of the same tenant.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.waiting import WaitingQueue, get_place
from plimsoll_engine.kvcache.block_hashes import extend_block_hashes
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.messages.worker_ipc import Media

# As a fraction of the token budget. Smaller chunks cost more than they save: each chunk reads the
# context again, and attention is faster for whole prompts. Shorter prompts have no minimum.
MIN_FIRST_CHUNK_FRACTION = 1 / 8

# After this wait, another tenant must give up places or blocks. Under an even load, places become
# free sooner, and nothing is computed twice.
FAIRNESS_PREEMPTION_WAIT_S = 1.0


@dataclass(slots=True)
class Chunk:
    """Part of a step: ``count`` tokens of ``request``, starting at token ``request.computed``."""

    request: Request
    count: int  # 0 if the request must wait
    encode: list[Media] = field(default_factory=list)  # media to encode first
    drafts: Sequence[int] = ()  # each adds a row to the step

    @property
    def rows(self) -> int:
        """Number of rows in the step, including those of drafts."""
        return self.count + len(self.drafts)

    @property
    def has_newest_token(self) -> bool:
        """Whether the chunk has the request's newest token, so that the next token is sampled."""
        return self.count == self.request.num_uncomputed


class Scheduler:
    """Scheduler of an engine's requests.

    There is no deadlock: it refuses a request that could not run alone in an empty pool, and never
    preempts the running request in the first place for another tenant.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        encoder: EncoderCache | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.pool = pool
        self.offload = offload
        self.encoder = encoder
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting = WaitingQueue()
        # Sorted by place.
        self.running: list[Request] = []
        # Requests with blocks of the previous worker that cannot run yet.
        self._waiting_with_blocks: WeakSet[Request] = WeakSet()
        # Hashes of blocks that the step being scheduled fills.
        self._blocks_in_step: set[bytes] = set()
        self.preemptions_total = 0
        self.prefix_query_tokens_total = 0
        self.prefix_hit_tokens_total = 0

    def get_refusal_reason(self, request: Request) -> str | None:
        """Return the reason why ``request`` can never run on this engine; None if it can."""
        if not request.num_prompt:
            return "the prompt is empty"
        if request.num_outputs >= request.sampling.max_tokens:
            return (
                f"the request has already generated all {request.sampling.max_tokens} tokens that"
                " max_tokens allows"
            )
        if len(request.token_ids) >= self.max_model_len:
            return (
                f"the prompt has {len(request.token_ids)} tokens, which leaves no room for output"
                f" in max_model_len {self.max_model_len}: shorten the prompt"
            )
        length = min(request.max_length, self.max_model_len)
        if (blocks := self.pool.count_blocks(length)) > self.pool.num_blocks:
            return (
                f"the prompt and max_tokens have {length} tokens, which need {blocks} KV blocks,"
                f" but the pool has {self.pool.num_blocks}: shorten the prompt, lower max_tokens or"
                " increase --num-blocks"
            )
        if self.encoder is not None:
            return self.encoder.get_refusal_reason(request)
        if request.media:
            return f"this model does not accept {request.media[0].kind} input"
        return None

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.add(request)

    def keep_inherited_blocks(self, request: Request) -> None:
        """Let ``request`` keep the blocks of the previous worker while its grammar is compiled.

        If the pool runs out of blocks, they are freed.
        """
        self._waiting_with_blocks.add(request)

    def start_with_inherited_blocks(self, request: Request) -> None:
        """Start ``request`` with the blocks that the previous worker computed for it.

        If the batch is full, the request loses these blocks and waits like a new request.
        """
        self._waiting_with_blocks.discard(request)
        self.waiting.add(request)
        if len(self.running) >= self.max_num_seqs:
            self._release_blocks_and_outputs(request)
            return
        self.waiting.start(request)
        self._insert_running(request)

    def remove(self, request: Request) -> None:
        """Remove ``request``, which has ended. The caller must release its blocks."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.waiting.forget_request(request)
        if self.encoder is not None:
            self.encoder.release_all(request)

    def schedule(self, single_request: Request | None = None) -> list[Chunk]:
        """Return the chunks of the next step; empty if nothing can run.

        If ``single_request`` is given, only this waiting request is scheduled, and running requests
        are preempted until it can start.
        """
        self._blocks_in_step.clear()
        if single_request is not None:
            if self.offload is not None:
                self.offload.reclaim()
                single_request.fetched = True
            while (
                not (chunk := self._start_waiting(single_request, self.max_num_batched_tokens))
                or not chunk.count
            ):
                if not self.running:
                    return []
                self.preempt(self.running[-1])
            return [chunk]
        self._preempt_for_fairness()
        chunks: list[Chunk] = []
        stopped: list[Request] = []
        budget = self.max_num_batched_tokens
        index = 0  # into running; the requests before it are scheduled
        while budget > 0:
            turn = self.running[index] if index < len(self.running) else None
            head = self.waiting.peek() if turn is None else self.waiting.find_more_urgent(turn)
            if head is not None and (head.in_flight.tokens or head in stopped):
                # It was preempted in this step, or its newest token is not known yet.
                head = None
            if turn is not None and (
                turn.in_flight.unconfirmed is not None
                or (turn.in_flight.tokens and turn.is_full(self.max_model_len))
            ):
                index += 1
                continue
            if head is None and turn is None:
                break
            if head is None:
                assert turn is not None
                chunk = self._continue_running(turn, budget)
            elif turn is None or head.place is not None or head is self.waiting.peek():
                chunk = self._start_waiting(head, budget)
            else:
                chunk = None  # head may only replace a request of its own tenant
            if chunk is not None and not chunk.count:
                # It waits until others have computed their media. No request is preempted for it.
                if chunk.request is turn:
                    index += 1
                else:
                    stopped.append(chunk.request)
            elif chunk is not None:
                chunks.append(chunk)
                self._record_blocks_in_step(chunk)
                budget -= chunk.count
                index += 1
            elif turn is None:
                break
            elif head is not None:
                last = [one for one in self.running if one.tenant == turn.tenant][-1]
                stopped.append(last)
                self._preempt_for(last, head)
            else:
                stopped.append(self.running[-1])  # possibly the request whose turn it is
                self.preempt(self.running[-1])
        return chunks

    def _preempt_for_fairness(self) -> None:
        # Does nothing if the larger tenant would then have the smaller share, because the two
        # tenants would preempt each other in turn.
        head = self.waiting.find_next_new()
        if (
            head is None
            or head.in_flight.tokens
            or time.monotonic() < head.arrived + FAIRNESS_PREEMPTION_WAIT_S
        ):
            return
        needed = self.pool.count_blocks(len(head.token_ids))
        if in_blocks := needed > self.pool.num_available:
            missing = needed - self.pool.num_available
        else:
            needed, missing = 1, len(self.running) + 1 - self.max_num_seqs
        if missing <= 0 or not self.running:
            return
        held = Counter[str]()
        for one in self.running:
            held[one.tenant] += len(one.block_ids) if in_blocks else 1
        ((largest, most),) = held.most_common(1)
        yielding: list[Request] = []
        freed = 0
        for one in reversed(self.running):
            if one.tenant == largest and freed < missing:
                yielding.append(one)
                freed += len(one.block_ids) if in_blocks else 1
        if freed < missing or most - freed < held[head.tenant] + needed:
            return
        for one in yielding[:-1]:
            self.preempt(one)
        self._preempt_for(yielding[-1], head)

    def _preempt_for(self, request: Request, replacement: Request) -> None:
        # ``replacement`` gets the place of ``request``, unless it already has a place.
        self.running.remove(request)
        self._release_blocks_and_outputs(request)
        if replacement.place is None:
            self.waiting.requeue_for(request, replacement)
        else:
            self.waiting.requeue(request)
        self.preemptions_total += 1

    def _continue_running(self, request: Request, budget: int) -> Chunk | None:
        count = min(request.num_uncomputed, budget)
        return self._create_chunk(request, count) if self._reserve_blocks(request, count) else None

    def _start_waiting(self, request: Request, budget: int) -> Chunk | None:
        # None if the batch is full or blocks are missing. A chunk of 0 tokens if the request must
        # wait for another reason.
        if len(self.running) >= self.max_num_seqs:
            return None
        if self._must_fetch(request):
            return Chunk(request, 0)
        self._take_cached_prefix(request)
        if self._is_next_block_in_step(request):
            self._release_blocks_and_outputs(request)
            return Chunk(request, 0)
        count = min(request.num_uncomputed, budget)
        if count < request.num_uncomputed and budget < int(
            self.max_num_batched_tokens * MIN_FIRST_CHUNK_FRACTION
        ):
            self._release_blocks_and_outputs(request)
            return Chunk(request, 0)  # so small a first chunk costs more than it saves
        if not self._reserve_blocks(request, count):
            self._release_blocks_and_outputs(request)
            return None
        chunk = self._create_chunk(request, count)
        if not chunk.count:
            self._release_blocks_and_outputs(request)
            return chunk
        self.waiting.start(request)
        self._insert_running(request)
        self.prefix_query_tokens_total += len(request.token_ids)
        self.prefix_hit_tokens_total += request.computed
        if request.started_at is None:
            request.started_at = time.monotonic()
            request.cached_tokens = request.computed
        return chunk

    def _insert_running(self, request: Request) -> None:
        insort(self.running, request, key=get_place)
        same = [one for one in self.running if one.tenant == request.tenant]
        if all(one.priority == request.priority for one in same):
            return
        places = [get_place(one) for one in same]
        same.sort(key=lambda one: one.priority)  # stable: equal priorities keep their order
        for one, number in zip(same, places, strict=True):
            one.place = number
        self.running.sort(key=get_place)

    def _record_blocks_in_step(self, chunk: Chunk) -> None:
        # Requests with the same prefix wait for these blocks instead of computing them again.
        if chunk.count > 1:
            start = chunk.request.computed
            size = self.pool.block_size
            full = slice(start // size, (start + chunk.count) // size)
            self._blocks_in_step.update(chunk.request.block_hashes[full])

    def _is_next_block_in_step(self, request: Request) -> bool:
        # ``request`` can then take the block from the prefix cache in the next step.
        index = len(request.block_ids)
        usable = self._count_cacheable_blocks(request)
        return index < usable and request.block_hashes[index] in self._blocks_in_step

    def _create_chunk(self, request: Request, num_tokens: int) -> Chunk:
        encode: list[Media] = []
        if self.encoder is not None:
            num_tokens, encode = self.encoder.reserve(request, num_tokens)
        self.waiting.charge_tokens(request, num_tokens)
        return Chunk(request, num_tokens, encode)

    def _release_blocks_and_outputs(self, request: Request) -> None:
        request.drop_blocks(self.pool)
        if self.encoder is not None:
            self.encoder.release_all(request)

    def _must_fetch(self, request: Request) -> bool:
        # A request waits for only one transfer. Blocks that are still missing afterwards are
        # computed.
        if self.offload is None or (request.fetched and not self.offload.transfers):
            return False
        extend_block_hashes(request, self.pool.block_size)
        usable = self._count_cacheable_blocks(request)
        if request.fetched:
            return self.offload.is_fetching(request.block_hashes[:usable])
        request.fetched = True
        return self.offload.fetch(request.block_hashes[:usable])

    def _count_cacheable_blocks(self, request: Request) -> int:
        # The last token is always computed, and so are prompt tokens whose log probabilities are
        # missing.
        tokens = request.scored if request.has_unscored_rows else len(request.token_ids) - 1
        return tokens // self.pool.block_size

    def _take_cached_prefix(self, request: Request) -> None:
        extend_block_hashes(request, self.pool.block_size)
        usable = self._count_cacheable_blocks(request)
        blocks = self.pool.find_cached_prefix(request.block_hashes[:usable])
        self.pool.add_references(blocks)
        request.block_ids = blocks
        request.registered = len(blocks)
        request.computed = len(blocks) * self.pool.block_size

    def _reserve_blocks(self, request: Request, num_tokens: int) -> bool:
        missing = self.pool.count_blocks(request.computed + num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None and self.offload is not None and self.offload.reclaim():
            blocks = self.pool.allocate(missing)
        if blocks is None and self._waiting_with_blocks:
            for kept in list(self._waiting_with_blocks):
                kept.drop_blocks(self.pool)
            self._waiting_with_blocks.clear()
            blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.block_ids += blocks
        return True

    def reserve_drafts(self, request: Request, max_drafts: int) -> int:
        """Allocate blocks for up to ``max_drafts`` drafts. Return the number of drafts that fit.

        No other request loses a block.
        """
        missing = self.pool.count_blocks(request.computed + 1 + max_drafts) - len(request.block_ids)
        if max_drafts > 0 and missing > 0:
            request.block_ids += self.pool.allocate(min(missing, self.pool.num_available)) or []
        room = len(request.block_ids) * self.pool.block_size - request.computed - 1
        return max(0, min(max_drafts, room))

    def record_accepted(self, request: Request) -> None:
        """Count one more accepted draft of ``request`` as computed."""
        self.waiting.charge_tokens(request, 1)
        self._add_computed(request, 1)

    def preempt(self, request: Request) -> None:
        """Preempt a running request. It waits again, and keeps its place."""
        self.running.remove(request)
        self._release_blocks_and_outputs(request)
        self.waiting.requeue(request)
        self.preemptions_total += 1

    def record_computed(self, chunk: Chunk) -> None:
        """Count the tokens of ``chunk`` as computed, and add full blocks to the prefix cache."""
        self._add_computed(chunk.request, chunk.count)

    def _add_computed(self, request: Request, num_tokens: int) -> None:
        request.computed += num_tokens
        extend_block_hashes(request, self.pool.block_size)
        # A pending token's block has no hash yet.
        full = min(request.computed // self.pool.block_size, len(request.block_hashes))
        for index in range(request.registered, full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.registered = full
        if self.encoder is not None:
            self.encoder.release_computed(request)
