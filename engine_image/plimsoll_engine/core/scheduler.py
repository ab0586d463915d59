"""Which requests compute which tokens in the next step: continuous batching, chunked prefill.

Running requests come first, oldest first, then waiting ones while the token budget, the number of
sequences and the blocks last. A prompt longer than the budget is computed in chunks over several
steps. When blocks run out, the youngest running request gives its blocks back and waits at the
front of the queue; its tokens are computed again later, mostly from the prefix cache.

There is no deadlock: a request that could not run alone in an empty pool is refused at once, and
the oldest running request is never preempted for another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from plimsoll_engine.core.blocks import BlockPool
from plimsoll_engine.core.prefix import extend_block_hashes
from plimsoll_engine.core.request import Request


@dataclass(slots=True)
class Chunk:
    """``count`` tokens of ``request`` from position ``request.computed`` on."""

    request: Request
    count: int

    @property
    def ends(self) -> bool:
        """Whether the chunk reaches the newest token, so that the next one is sampled."""
        return self.count == self.request.uncomputed


class Scheduler:
    """The queues of one engine. It owns no tensor."""

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions_total = 0
        self.prefix_query_tokens_total = 0
        self.prefix_hit_tokens_total = 0

    def refusal(self, request: Request) -> str | None:
        """Why ``request`` can never run here, or None."""
        if not request.num_prompt:
            return "the prompt is empty"
        if request.num_outputs >= request.sampling.max_tokens:
            return f"all of its max_tokens {request.sampling.max_tokens} are already made"
        if len(request.token_ids) >= self.max_model_len:
            return (
                f"{len(request.token_ids)} tokens leave no room for output in max_model_len"
                f" {self.max_model_len}; shorten the prompt"
            )
        length = min(request.max_length, self.max_model_len)
        if (blocks := self.pool.blocks_for(length)) > self.pool.num_blocks:
            return (
                f"{length} tokens (prompt and max_tokens) need {blocks} KV blocks and the pool has"
                f" {self.pool.num_blocks}; shorten the prompt, lower max_tokens or give the engine"
                f" more blocks"
            )
        return None

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take ``request`` out of its queue; its blocks are for its release to give back."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def schedule(self, only: Request | None = None) -> list[Chunk]:
        """The chunks of the next step; empty only when nothing can run.

        With ``only``, that waiting request alone is computed (to find out which request of a
        failed batch is at fault).
        """
        if only is not None:
            self.waiting.remove(only)
            self.waiting.appendleft(only)
            return self._admit(self.max_num_batched_tokens, limit=1)
        preempted = self.preemptions_total
        chunks = self._continue_running()
        if self.preemptions_total > preempted:
            return chunks  # blocks are short: who was just stopped must not take them again
        budget = self.max_num_batched_tokens - sum(chunk.count for chunk in chunks)
        return chunks + self._admit(budget, limit=self.max_num_seqs)

    def _continue_running(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.uncomputed, budget)
            if self._reserve(request, count):
                chunks.append(Chunk(request, count))
                budget -= count
                index += 1
            else:
                # The youngest may be this one; then it waits and the loop ends.
                self.preempt(self.running[-1])
        return chunks

    def _admit(self, budget: int, limit: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self.waiting and budget > 0 and len(chunks) < limit:
            if len(self.running) >= self.max_num_seqs:
                break
            request = self.waiting[0]
            self._take_prefix(request)
            count = min(request.uncomputed, budget)
            if not self._reserve(request, count):
                request.drop_blocks(self.pool)
                if self.running and limit == 1:
                    self.preempt(self.running[-1], behind=request)
                    continue
                break
            self.waiting.popleft()
            self.running.append(request)
            self.prefix_query_tokens_total += len(request.token_ids)
            self.prefix_hit_tokens_total += request.computed
            chunks.append(Chunk(request, count))
            budget -= count
        return chunks

    def _take_prefix(self, request: Request) -> None:
        """Share the blocks of the longest cached beginning; the last token is always computed."""
        extend_block_hashes(request, self.pool.block_size)
        usable = (len(request.token_ids) - 1) // self.pool.block_size
        blocks = self.pool.lookup(request.block_hashes[:usable])
        self.pool.share(blocks)
        request.block_ids = blocks
        request.registered = len(blocks)
        request.computed = len(blocks) * self.pool.block_size

    def _reserve(self, request: Request, count: int) -> bool:
        """Give ``request`` the blocks for ``count`` more tokens; False where they are missing."""
        missing = self.pool.blocks_for(request.computed + count) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.block_ids += blocks
        return True

    def preempt(self, request: Request, behind: Request | None = None) -> None:
        """Stop a running request: it waits in front, or right ``behind`` the first waiting one."""
        self.running.remove(request)
        request.drop_blocks(self.pool)
        self.waiting.insert(0 if behind is None else 1, request)
        self.preemptions_total += 1

    def computed(self, chunk: Chunk) -> None:
        """Note that the chunk's keys and values are in the pool; offer its full blocks."""
        request = chunk.request
        request.computed += chunk.count
        extend_block_hashes(request, self.pool.block_size)
        full = request.computed // self.pool.block_size
        for index in range(request.registered, full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.registered = full
