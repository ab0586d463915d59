"""Forward passes over scheduled chunks: requests in, the next tokens out.

A step is launched, and its tokens are asked for later: the device may still be at work on it when
the next one is launched. One copy to the device and one back a step. Where several ranks compute
the model, this is rank 0's: each call is a command to the others as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch

from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.inputs import collect, place
from plimsoll_engine.core.execute.prompt_scores import Part, Scored, parts
from plimsoll_engine.core.execute.sampling import Plan, Sampled, plan, sample
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.core.speculation.drafting import taken
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.kvcache.block_sums import add_sums
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.messages.worker_ipc import Logprobs, Media, PromptScores
from plimsoll_engine.models.model import MediaModel, Model

SHORT_ROWS = 64
"""A step of so many rows at most takes the device about as long as one of one row, by the weights
that it reads."""
SHORT_READ = 16_384
"""Tokens that such rows of prompts may read in all, each its own context. Of an 8B model these are
64 MiB a layer, which take .7 ms in all layers (H100)."""


class NextToken(NamedTuple):
    """One drawn token, with log probabilities where the request wants them."""

    token_id: int
    logprobs: Logprobs | None


class Landed(NamedTuple):
    """The next tokens of a request: one, and one more for each of its first drafts that was right.

    ``drafts`` is how many it had.
    """

    request: Request
    tokens: list[NextToken]
    drafts: int


@dataclass(slots=True)
class Flight:
    """A launched step. It holds no request: one that ends before it lands is gone.

    A request has a row of ``sampled`` for its next token and one for each of its ``drafts``.
    """

    requests: list[ref[Request]]
    drafts: list[Sequence[int]]
    sampled: Sampled | None
    landed: Any
    """The CUDA event after the copy of the tokens; None on a CPU."""
    scored: Scored | None = None

    def scores(self) -> list[PromptScores]:
        """Wait for the step; what it tells of prompts of requests that are still there."""
        if self.scored is None:
            return []
        if self.landed is not None:
            self.landed.synchronize()
        return self.scored.landed()

    def land(self) -> list[Landed]:
        """Wait for the step; the next tokens of each request that is still there."""
        if self.sampled is None:
            return []
        if self.landed is not None:
            self.landed.synchronize()
        logprobs = self.sampled.logprobs()
        tokens = self.sampled.tokens.tolist()
        found = []
        row = 0
        for reference, drafts in zip(self.requests, self.drafts, strict=True):
            request, first = reference(), row
            row += 1 + len(drafts)
            if request is not None and not request.released:
                own = first + taken(drafts, tokens[first:row])
                new = [NextToken(tokens[one], logprobs.get(one)) for one in range(first, own)]
                found.append(Landed(request, new, len(drafts)))
        return found


class Runner(Forward):
    """A :class:`Forward` that knows requests. ``leader`` commands the other ranks, if any."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        memory: torch.Tensor | None = None,
        leader: Leader | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, num_blocks, block_size, memory, kv_dtype)
        self._leader = leader
        self.pools: list[rank_ipc.PoolMade] = []
        """Those of the other ranks."""
        if leader is not None:
            shared = memory is not None
            command = rank_ipc.CreatePool(num_blocks, block_size, model.kv.layers, shared)
            self.pools = leader.ask(command, rank_ipc.PoolMade)

    def block_sums(self, blocks: Sequence[int]) -> list[int]:
        """Return a sum of what each of ``blocks`` holds on all ranks."""
        sums = super().block_sums(blocks)
        if self._leader is None:
            return sums
        others = self._leader.ask(rank_ipc.ChecksumBlocks(list(blocks)), rank_ipc.BlockSums)
        return add_sums([sums, *(answer.sums for answer in others)])

    def capture_graphs(
        self, max_num_seqs: int, max_blocks: int, later: bool = False, longest: int = 0
    ) -> None:
        """Capture on every rank at the same time: the collectives are part of the graphs."""
        with self._together(rank_ipc.PrepareGraphs(max_num_seqs, max_blocks, later, longest)):
            super().capture_graphs(max_num_seqs, max_blocks, later, longest)

    def capture_more(self) -> bool:
        """Do one more piece on every rank. False when none is missing."""
        if not self.incomplete:
            return False
        with self._together(rank_ipc.CaptureGraph()):
            return super().capture_more()

    def _together(self, command: rank_ipc.Command) -> AbstractContextManager[None]:
        return nullcontext() if self._leader is None else self._leader.together(command)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Flight:
        """Compute ``chunks``; those that end get a token, which the flight brings.

        Decode rows must not be mixed in behind prefill chunks, so the order here is this method's.
        Raises :class:`plimsoll_engine.errors.RanksLost` where several ranks are at work
        on the step and it fails; whatever else it raises concerns this step alone.
        """
        chunks = sorted(chunks, key=place)
        ending = [chunk for chunk in chunks if chunk.ends]
        made = plan([row for chunk in ending for row in chunk.request.rows(chunk.drafts)])
        scored = parts(chunks)
        inputs = collect(chunks, self.block_size, scored, self._by_row(chunks))
        inputs.greedy = made.greedy
        with self._together(rank_ipc.Step(inputs)):
            sampled = self._next_tokens(inputs, chunks, made)
        if isinstance(sampled, Exception):
            raise sampled
        told = self._told(scored)
        if sampled is None:
            return self._take_off([], None, told)
        row = 0
        for chunk in ending:
            chunk.request.sampled_row = row
            row += 1 + len(chunk.drafts)
        return self._take_off(ending, sampled, told)

    def _by_row(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a captured decode step computes these prompts, too: they are short.

        Launching a step's kernels one by one takes the host longer than the device computes them.
        """
        rows = sum(chunk.rows for chunk in chunks)
        if self.graphs is None or rows > SHORT_ROWS or not self.graphs.fits(rows):
            return False
        if any(chunk.request.adapter is not None for chunk in chunks):
            return False
        prompts = [chunk for chunk in chunks if chunk.count > 1]
        read = sum(chunk.count * (chunk.request.computed + chunk.count) for chunk in prompts)
        return 0 < read <= SHORT_READ

    def _told(self, scored: list[Part]) -> Scored | None:
        scores, self.scores = self.scores, None
        if scores is None:
            return None
        return Scored([(ref(p.request), p.first + 1, len(p.targets)) for p in scored], scores)

    def _next_tokens(
        self, inputs: Inputs, chunks: Sequence[Chunk], made: Plan
    ) -> Sampled | Exception | None:
        """Return what rank 0 samples, or why it cannot: the other ranks get tokens all the same.

        So the failure is that of a request, and the group goes on.
        """
        tokens, logits = self.compute(inputs, chunks)
        # This may be a graph's own memory. What reads it is launched before the next replay.
        if tokens is not None and inputs.greedy:
            self.newest = tokens
            return Sampled(tokens)
        if logits is None:
            return None
        try:
            sampled = sample(logits, made)
        except Exception as error:  # noqa: BLE001 - whatever torch raises
            zeros = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
            self.newest = self.group.broadcast(zeros)
            return error.with_traceback(None)
        self.newest = self.group.broadcast(sampled.tokens)
        return sampled

    def _take_off(
        self, ending: list[Chunk], sampled: Sampled | None, scored: Scored | None
    ) -> Flight:
        landed = None
        if self.device.type == "cuda" and (sampled is not None or scored is not None):
            sampled = None if sampled is None else sampled.to_host()
            if scored is not None:
                scored.scores = scored.scores.to_host()
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record()
        requests, drafts = [ref(chunk.request) for chunk in ending], [c.drafts for c in ending]
        return Flight(requests, drafts, sampled, landed, scored)

    @property
    def needs_media(self) -> bool:
        """Whether every request must have an image or a sound: all its tokens attend to it."""
        return (
            self.outputs is not None and isinstance(self.model, MediaModel) and self.model.lifelong
        )

    def example_media(self) -> list[Media]:
        """One of the largest media that the model takes, none where it takes text alone."""
        return [self.model.example()] if isinstance(self.model, MediaModel) else []

    def close(self) -> None:
        """As in every rank, and in every rank."""
        leader, self._leader = self._leader, None
        super().close()
        if leader is not None:
            leader.drop()
