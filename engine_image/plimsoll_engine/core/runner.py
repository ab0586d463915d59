"""Forward passes over scheduled chunks: tensors in, the next tokens out.

A step is launched, and its tokens are asked for later: the device may still be at work on it when
the next one is launched. So the newest token of a request may be one that only the device knows;
the next step takes it from there. One copy to the device and one back a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch

from plimsoll_engine.core.encoder_outputs import EncoderOutputs
from plimsoll_engine.core.graphs import DecodeGraphs
from plimsoll_engine.core.inputs import Inputs, collect, to_device
from plimsoll_engine.core.request import Request
from plimsoll_engine.core.sampling import Sampled, plan, sample
from plimsoll_engine.core.scheduler import Chunk
from plimsoll_engine.ipc import Logprobs, Media
from plimsoll_engine.kernels.choose import ops_for
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.interface import MediaModel, Model, StepPlan


class NextToken(NamedTuple):
    token_id: int
    logprobs: Logprobs | None


@dataclass(slots=True)
class Flight:
    """A launched step. It holds no request: one that ends before it lands is gone."""

    requests: list[ref[Request]]
    sampled: Sampled | None
    landed: Any
    """The CUDA event after the copy of the tokens; None on a CPU."""

    def land(self) -> list[tuple[Request, NextToken]]:
        """Wait for the step; the next token of each request that is still there."""
        if self.sampled is None:
            return []
        if self.landed is not None:
            self.landed.synchronize()
        logprobs = self.sampled.logprobs()
        tokens = self.sampled.tokens.tolist()
        found = []
        for row, (reference, token_id) in enumerate(zip(self.requests, tokens, strict=True)):
            request = reference()
            if request is not None and not request.released:
                found.append((request, NextToken(token_id, logprobs.get(row))))
        return found


class Runner:
    """The model, the KV pool's tensors and the device they are on."""

    def __init__(
        self, model: Model, num_blocks: int, block_size: int, memory: torch.Tensor | None = None
    ) -> None:
        """``memory`` uint8 [bytes] is the KV pool's where it is lent; else it is allocated here."""
        self.model: Model | None = model
        self.outputs = EncoderOutputs(model) if isinstance(model, MediaModel) else None
        self.block_size = block_size
        self.device: torch.device = model.device
        self.graphs: DecodeGraphs | None = None
        self._ops = ops_for(self.device)
        layers, heads, dim = model.kv
        shape = (2, layers, num_blocks * block_size, heads, dim)
        self.kv: torch.Tensor | None
        if memory is None:
            self.kv = torch.empty(shape, dtype=model.dtype, device=self.device)
            # Zeros are written, not only reserved: a pool that filled its pages while it serves
            # would look like growth.
            self.kv.zero_()
        else:
            self.kv = memory.view(model.dtype).view(shape)
        self._newest: torch.Tensor | None = None
        """The tokens that the last step sampled, on the device; a request knows its row."""

    @property
    def kv_bytes(self) -> int:
        return 0 if self.kv is None else self.kv.nbytes

    @property
    def graph_bytes(self) -> int:
        """Device memory of the captured steps."""
        return 0 if self.graphs is None else self.graphs.nbytes

    def capture_graphs(self, max_num_seqs: int, max_blocks: int, later: bool = False) -> None:
        """Capture decode steps of the first few batch sizes (CUDA only), or none with ``later``;
        :meth:`capture_more` captures the others. ``max_blocks`` is the most blocks of one request.
        """
        if self.device.type != "cuda" or not isinstance(self.model, Decoder):
            return
        assert self.kv is not None
        self.graphs = DecodeGraphs(self.model, self.kv, self.block_size, max_num_seqs, max_blocks)
        if not later:
            self.graphs.capture_first()

    def capture_more(self) -> bool:
        """Capture one more batch size; False where none is missing."""
        return self.graphs is not None and self.graphs.capture_next()

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Flight:
        """Compute ``chunks``; those that end get a token, which the flight brings.

        Decode rows must not be mixed in behind prefill chunks, so the order here is this method's.
        """
        assert self.model is not None
        chunks = sorted(chunks, key=_place)
        ending = [chunk.request for chunk in chunks if chunk.ends]
        made = plan([request.row() for request in ending])
        inputs = collect(chunks, self.block_size)
        tokens: torch.Tensor | None = None
        logits: torch.Tensor | None = None
        decoding = chunks[-1].count == 1 and len(ending) == len(chunks)
        if self.graphs is not None and decoding and self.graphs.fits(len(chunks)):
            tokens, logits = self.graphs.replay(inputs, self._newest)
        else:
            logits = self._compute(chunks, inputs)
        if logits is None:
            return Flight([], None, None)
        sampled = sample(logits, made) if tokens is None or not made.greedy else Sampled(tokens)
        # A copy, because the next step may write where these are.
        self._newest = sampled.tokens.clone()
        for row, request in enumerate(ending):
            request.sampled_row = row
        return self._take_off(ending, sampled)

    def _take_off(self, ending: list[Request], sampled: Sampled) -> Flight:
        landed = None
        if self.device.type == "cuda":
            sampled = sampled.to_host()
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record()
        return Flight([ref(request) for request in ending], sampled, landed)

    def _compute(self, chunks: Sequence[Chunk], inputs: Inputs) -> torch.Tensor | None:
        """The logits of the chunks that end; None where none does."""
        assert self.model is not None
        assert self.kv is not None
        ends = inputs.starts[1:] - 1
        last = ends[[chunk.ends for chunk in chunks]]
        fields = [
            inputs.ids, inputs.sources, inputs.positions, inputs.slots, inputs.contexts,
            inputs.starts, last, inputs.tables.reshape(-1),
        ]  # fmt: skip
        packed = to_device(np.concatenate(fields), self.device)
        ids, sources, positions, slots, contexts, starts, rows, tables = torch.split(
            packed, [len(field) for field in fields]
        )
        if self._newest is not None and bool((inputs.sources >= 0).any()):
            ids = self._ops.take(ids, sources, self._newest)
        decodes = sum(1 for chunk in chunks if chunk.count == 1)
        step = StepPlan(
            keys=self.kv[0],
            values=self.kv[1],
            block_size=self.block_size,
            write_slots=slots.long(),
            tables=tables.view(inputs.tables.shape),
            contexts=contexts,
            starts=starts,
            decodes=decodes,
            longest=max((chunk.count for chunk in chunks[decodes:]), default=0),
            fresh=tuple(c.count for c in chunks[decodes:] if not c.request.computed),
        )
        ids = ids.long()
        embeds = None if self.outputs is None else self.outputs.prepare(chunks, ids, step)
        hidden = self.model.forward(ids, positions.long(), step, embeds)
        return self.model.logits(self._ops.rows(hidden, rows)) if len(last) else None

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
        """Let go of the model, the KV pool and the graphs. Again does nothing more."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self.model = None
        self.kv = None
        self._newest = None
        if self.outputs is not None:
            self.outputs.close()


def _place(chunk: Chunk) -> tuple[int, int]:
    """Where a chunk's rows are: decode rows first, the longest context first, since it takes the
    device longest; then prompts that go on; then whole ones, the shortest first."""
    if chunk.count == 1:
        return 0, -chunk.request.computed
    return (1, 0) if chunk.request.computed else (2, chunk.count)
