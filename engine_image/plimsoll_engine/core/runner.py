"""One forward pass over the scheduled chunks: tensors in, the next tokens out.

One copy to the device and one back a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from plimsoll_engine.core.encoder_outputs import EncoderOutputs
from plimsoll_engine.core.sampling import plan, sample
from plimsoll_engine.core.scheduler import Chunk
from plimsoll_engine.ipc import Logprobs
from plimsoll_engine.models.interface import MediaModel, Model, StepPlan


class NextToken(NamedTuple):
    token_id: int
    logprobs: Logprobs | None


class Runner:
    """The model, the KV pool's tensors and the device they are on."""

    def __init__(self, model: Model, num_blocks: int, block_size: int) -> None:
        self.model: Model | None = model
        self.outputs = EncoderOutputs(model) if isinstance(model, MediaModel) else None
        self.block_size = block_size
        self.device: torch.device = model.device
        layers, heads, dim = model.kv
        shape = (2, layers, num_blocks * block_size, heads, dim)
        # Zeros are written, not only reserved: a pool that filled its pages while it serves would
        # look like growth.
        self.kv: torch.Tensor | None = torch.empty(shape, dtype=model.dtype, device=self.device)
        self.kv.zero_()

    @property
    def kv_bytes(self) -> int:
        return 0 if self.kv is None else self.kv.nbytes

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> dict[str, NextToken]:
        """Compute ``chunks``; the next token of each request whose chunk ends, by request id.

        Decode rows must not be mixed in behind prefill chunks, so the order here is this method's.
        """
        assert self.model is not None
        chunks = sorted(chunks, key=lambda chunk: chunk.count > 1)
        ids, step, positions, last_rows = self._inputs(chunks)
        embeds = None if self.outputs is None else self.outputs.prepare(chunks, ids, step)
        hidden = self.model.forward(ids, positions, step, embeds)
        ending = [chunk.request for chunk in chunks if chunk.ends]
        if not ending:
            return {}
        logits = self.model.logits(hidden[last_rows])
        sampled = sample(logits, plan([request.row() for request in ending]))
        logprobs = sampled.logprobs()
        return {
            request.request_id: NextToken(token_id, logprobs.get(row))
            for row, (request, token_id) in enumerate(
                zip(ending, sampled.tokens.tolist(), strict=True)
            )
        }

    def _inputs(
        self, chunks: Sequence[Chunk]
    ) -> tuple[torch.Tensor, StepPlan, torch.Tensor, torch.Tensor]:
        """Everything of a step that is integers, packed for one copy to the device."""
        assert self.kv is not None
        ids: list[int] = []
        positions: list[int] = []
        write: list[int] = []
        last_rows: list[int] = []
        starts = [0]
        width = max(len(chunk.request.block_ids) for chunk in chunks)
        tables: list[int] = []
        for chunk in chunks:
            blocks, start = chunk.request.block_ids, chunk.request.computed
            own = range(start, start + chunk.count)
            ids += chunk.request.token_ids[start : start + chunk.count]
            positions += own
            write += [
                blocks[position // self.block_size] * self.block_size + position % self.block_size
                for position in own
            ]
            if chunk.ends:
                last_rows.append(len(ids) - 1)
            tables += blocks + [0] * (width - len(blocks))
            starts.append(len(ids))
        contexts = [chunk.request.computed + chunk.count for chunk in chunks]
        fields = [ids, positions, write, last_rows, tables, contexts, starts]
        packed = torch.tensor([number for field in fields for number in field])
        packed = packed.to(self.device, non_blocking=True)
        split = torch.split(packed, [len(field) for field in fields])
        ids_t, positions_t, write_t, last_t, tables_t, contexts_t, starts_t = split
        decodes = sum(1 for chunk in chunks if chunk.count == 1)
        plan = StepPlan(
            keys=self.kv[0],
            values=self.kv[1],
            block_size=self.block_size,
            write_slots=write_t,
            tables=tables_t.view(len(chunks), width).int(),
            contexts=contexts_t.int(),
            starts=starts_t.int(),
            decodes=decodes,
            longest=max((chunk.count for chunk in chunks[decodes:]), default=0),
            fresh=all(chunk.request.computed == 0 for chunk in chunks[decodes:]),
        )
        return ids_t, plan, positions_t, last_t

    def close(self) -> None:
        """Let go of the model and the KV pool. Again does nothing more."""
        self.model = None
        self.kv = None
        if self.outputs is not None:
            self.outputs.close()
