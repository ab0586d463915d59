"""Run the model on scheduled chunks, and return the next tokens of the requests.

It launches a step, and reads its tokens later. With several ranks, it is on rank 0, and each of its
calls also sends a command to the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch

from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.inputs import collect_inputs, get_row_order
from plimsoll_engine.core.execute.prompt_scores import (
    LaunchedScores,
    ScoredRows,
    list_scored_rows,
)
from plimsoll_engine.core.execute.sampling import (
    SampledTokens,
    SamplingPlan,
    create_sampling_row,
    plan_sampling,
    sample,
)
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.kvcache.block_sums import combine_block_sums
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.messages.worker_ipc import Logprobs, Media, PromptScores
from plimsoll_engine.models.model import MediaModel, Model

# In a step with short prompts that runs as a decode step. The rows cost little, because reading the
# weights takes most of the time.
MAX_SHORT_STEP_ROWS = 64
# In a step with short prompts that runs as a decode step. In an 8B model, reading this many tokens
# takes 0.7 ms on an H100 (64 MiB per layer).
MAX_SHORT_STEP_CONTEXT = 16_384


class NextToken(NamedTuple):
    """Sampled token, with log probabilities if the request asks for them."""

    token_id: int
    logprobs: Logprobs | None


class StepResult(NamedTuple):
    """Next tokens of one request: one token, and another for each accepted draft."""

    request: Request
    tokens: list[NextToken]
    drafts: int  # number of drafts that were verified


@dataclass(slots=True)
class InFlightStep:
    """Launched step whose tokens have not been read yet."""

    requests: list[ref[Request]]  # weak, because a request may end before the step does
    drafts: list[Sequence[int]]
    sampled: SampledTokens | None  # one row for each request, and one for each of its drafts
    # CUDA event that follows the copy of the tokens to the host; None on a CPU.
    copied: Any
    scored: LaunchedScores | None = None

    def collect_prompt_scores(self) -> list[PromptScores]:
        """Wait for the step, and return the prompt log probabilities of existing requests."""
        if self.scored is None:
            return []
        if self.copied is not None:
            self.copied.synchronize()
        return self.scored.create_messages()

    def collect_results(self) -> list[StepResult]:
        """Wait for the step, and return the next tokens of existing requests."""
        if self.sampled is None:
            return []
        if self.copied is not None:
            self.copied.synchronize()
        logprobs = self.sampled.get_logprobs()
        tokens = self.sampled.tokens.tolist()
        found = []
        row = 0
        for reference, drafts in zip(self.requests, self.drafts, strict=True):
            request, first = reference(), row
            row += 1 + len(drafts)
            if request is not None and not request.released:
                own = first + count_valid_tokens(drafts, tokens[first:row])
                new = [NextToken(tokens[one], logprobs.get(one)) for one in range(first, own)]
                found.append(StepResult(request, new, len(drafts)))
        return found


def count_valid_tokens(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the number of sampled ``tokens`` that are valid: one more than the accepted drafts.

    A draft is accepted if it and all drafts before it equal the sampled tokens.
    """
    # This is rejection sampling with each draft as a point mass: after a rejection, the sampled
    # token has the model's distribution without the draft.
    for number, (draft, token) in enumerate(zip(drafts, tokens, strict=False)):
        if draft != token:
            return number + 1
    return len(tokens)


class Runner(Forward):
    """:class:`Forward` for scheduled requests. ``leader`` connects to the other ranks, if any."""

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
        self.pools: list[rank_ipc.PoolReply] = []
        if leader is not None:
            shared = memory is not None
            command = rank_ipc.CreatePool(num_blocks, block_size, model.kv.layers, shared)
            self.pools = leader.request_replies(command, rank_ipc.PoolReply)

    def compute_block_sums(self, blocks: Sequence[int]) -> list[int]:
        """Return a checksum of each block in ``blocks``, combined over all ranks."""
        sums = super().compute_block_sums(blocks)
        if self._leader is None:
            return sums
        others = self._leader.request_replies(
            rank_ipc.ChecksumBlocks(list(blocks)), rank_ipc.BlockChecksums
        )
        return combine_block_sums([sums, *(answer.sums for answer in others)])

    def capture_graphs(
        self, max_rows: int, max_blocks: int, deferred: bool = False, max_prompt_tokens: int = 0
    ) -> None:
        """Capture graphs on all ranks at the same time, because graphs contain collectives."""
        command = rank_ipc.PrepareGraphs(max_rows, max_blocks, deferred, max_prompt_tokens)
        with self._run_on_ranks(command):
            super().capture_graphs(max_rows, max_blocks, deferred, max_prompt_tokens)

    def capture_next_graph(self) -> bool:
        """Capture one more graph on every rank. Return False if none is left."""
        if not self.has_missing_graphs:
            return False
        with self._run_on_ranks(rank_ipc.CaptureGraph()):
            return super().capture_next_graph()

    @property
    def graph_bytes(self) -> int:
        """Device memory of the CUDA graphs on all ranks, in bytes."""
        others = [] if self._leader is None else self._leader.get_memory_reports()
        return super().graph_bytes + sum(rank.graph_bytes for rank in others)

    def _run_on_ranks(self, command: rank_ipc.Command) -> AbstractContextManager[None]:
        return nullcontext() if self._leader is None else self._leader.run_on_all_ranks(command)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> InFlightStep:
        """Launch a step that samples a token for each chunk with the newest token of its request.

        Raises RanksLostError if the step fails with several ranks. Any other exception affects only
        this step.
        """
        chunks = sorted(chunks, key=get_row_order)
        ending = [chunk for chunk in chunks if chunk.has_newest_token]
        sampling_plan = plan_sampling(
            [
                create_sampling_row(chunk.request, chunk.drafts[:count])
                for chunk in ending
                for count in range(len(chunk.drafts) + 1)
            ]
        )
        scored = list_scored_rows(chunks)
        inputs = collect_inputs(chunks, self.block_size, scored, self._has_short_prompts(chunks))
        inputs.greedy = sampling_plan.is_greedy
        with self._run_on_ranks(rank_ipc.Step(inputs)):
            sampled = self._sample_tokens(inputs, chunks, sampling_plan)
        if isinstance(sampled, Exception):
            try:
                raise sampled
            finally:
                del sampled  # its traceback has this frame: a cycle that would keep the requests
        prompt_scores = self._take_scores(scored)
        if sampled is None:
            return self._copy_to_host([], None, prompt_scores)
        row = 0
        for chunk in ending:
            chunk.request.in_flight.row = row
            row += 1 + len(chunk.drafts)
        return self._copy_to_host(ending, sampled, prompt_scores)

    def _has_short_prompts(self, chunks: Sequence[Chunk]) -> bool:
        # Such prompts run as a captured decode step. This saves the launches of single kernels,
        # which would take the host longer than the computation.
        rows = sum(chunk.rows for chunk in chunks)
        if self.graphs is None or rows > MAX_SHORT_STEP_ROWS or not self.graphs.has_graph(rows):
            return False
        if any(chunk.request.adapter is not None for chunk in chunks):
            return False
        prompts = [chunk for chunk in chunks if chunk.count > 1]
        read = sum(chunk.count * (chunk.request.computed + chunk.count) for chunk in prompts)
        return 0 < read <= MAX_SHORT_STEP_CONTEXT

    def _take_scores(self, scored: list[ScoredRows]) -> LaunchedScores | None:
        scores, self.scores = self.scores, None
        if scores is None:
            return None
        return LaunchedScores(
            [(ref(p.request), p.first + 1, len(p.targets)) for p in scored], scores
        )

    def _sample_tokens(
        self, inputs: Inputs, chunks: Sequence[Chunk], sampling_plan: SamplingPlan
    ) -> SampledTokens | Exception | None:
        # None if no row is sampled. If sampling fails, the exception is returned, because the other
        # ranks must still receive tokens.
        tokens, logits = self.compute(inputs, chunks)
        # The tokens may be in a graph's memory. All readers are launched before the next replay.
        if tokens is not None and inputs.greedy:
            self.newest = tokens
            return SampledTokens(tokens)
        if logits is None:
            return None
        try:
            sampled = sample(logits, sampling_plan)
        except Exception as error:  # noqa: BLE001 - whatever torch raises
            zeros = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
            self.newest = self.group.broadcast(zeros)
            return error.with_traceback(None)
        self.newest = self.group.broadcast(sampled.tokens)
        return sampled

    def _copy_to_host(
        self,
        ending_chunks: list[Chunk],
        sampled: SampledTokens | None,
        scored: LaunchedScores | None,
    ) -> InFlightStep:
        copied = None
        if self.device.type == "cuda" and (sampled is not None or scored is not None):
            sampled = None if sampled is None else sampled.copy_to_host()
            if scored is not None:
                scored.scores = scored.scores.copy_to_host()
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        requests, drafts = (
            [ref(chunk.request) for chunk in ending_chunks],
            [c.drafts for c in ending_chunks],
        )
        return InFlightStep(requests, drafts, sampled, copied, scored)

    @property
    def needs_media(self) -> bool:
        """Whether every request needs an image or audio clip, as in encoder-decoder models."""
        return (
            self.outputs is not None
            and isinstance(self.model, MediaModel)
            and self.model.is_encoder_decoder
        )

    def create_example_media(self) -> list[Media]:
        """Return an image or audio clip of the maximum size; an empty list for a text model."""
        return [self.model.make_dummy_media()] if isinstance(self.model, MediaModel) else []

    def close(self) -> None:
        """Release the model and the KV pool of this rank, and the KV pools of the other ranks.

        Idempotent.
        """
        leader, self._leader = self._leader, None
        super().close()
        if leader is not None:
            leader.release_pools()
