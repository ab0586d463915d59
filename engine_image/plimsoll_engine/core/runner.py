"""One forward pass over the scheduled chunks: tensors in, the next tokens out.

One copy to the device and one back a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from plimsoll_engine.core.sampling import plan, sample
from plimsoll_engine.core.scheduler import Chunk
from plimsoll_engine.ipc import Logprobs
from plimsoll_engine.models.paged_attention import Prefill, StepPlan


class NextToken(NamedTuple):
    token_id: int
    logprobs: Logprobs | None


class Runner:
    """The model, the KV pool's tensors and the device they are on."""

    def __init__(self, model: Any, num_blocks: int, block_size: int) -> None:
        self.model: Any = model
        self.block_size = block_size
        config = model.config
        self.device: torch.device = model.device
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, config.num_hidden_layers, num_blocks * block_size, heads, dim)
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
        chunks = sorted(chunks, key=lambda chunk: chunk.count > 1)
        ids, step, positions, last_rows = self._inputs(chunks)
        out = self.model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=last_rows,
            plan=step,
        )
        ending = [chunk.request for chunk in chunks if chunk.ends]
        if not ending:
            return {}
        sampled = sample(out.logits[0], plan([request.row() for request in ending]))
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
        last_rows: list[int] = []
        tables: list[list[int]] = []
        widest = max((len(c.request.block_ids) for c in chunks if c.count == 1), default=0)
        for chunk in chunks:
            request, start = chunk.request, chunk.request.computed
            ids += request.token_ids[start : start + chunk.count]
            positions += range(start, start + chunk.count)
            if chunk.ends:
                last_rows.append(len(ids) - 1)
            width = widest if chunk.count == 1 else len(request.block_ids)
            tables.append(request.block_ids + [0] * (width - len(request.block_ids)))
        table = [block for row in tables for block in row]
        write = [
            chunk.request.block_ids[position // self.block_size] * self.block_size
            + position % self.block_size
            for chunk in chunks
            for position in range(chunk.request.computed, chunk.request.computed + chunk.count)
        ]
        packed = torch.tensor(ids + positions + write + last_rows + table, dtype=torch.int64)
        packed = packed.to(self.device, non_blocking=True)
        sizes = [len(ids), len(ids), len(ids), len(last_rows), len(table)]
        ids_t, positions_t, write_t, last_t, table_t = torch.split(packed, sizes)
        decodes = sum(1 for chunk in chunks if chunk.count == 1)
        offsets = torch.arange(self.block_size, device=self.device)
        slots = (table_t.unsqueeze(-1) * self.block_size + offsets).flatten()
        split = decodes * widest * self.block_size
        context = torch.arange(widest * self.block_size, device=self.device)
        plan = StepPlan(
            keys=self.kv[0],
            values=self.kv[1],
            write_slots=write_t,
            decodes=decodes,
            decode_slots=slots[:split].view(decodes, widest * self.block_size),
            decode_mask=context <= positions_t[:decodes].unsqueeze(-1),
            prefills=self._prefills(chunks[decodes:], decodes, slots[split:], positions_t),
        )
        return ids_t, plan, positions_t, last_t

    def _prefills(
        self, chunks: Sequence[Chunk], row: int, slots: torch.Tensor, positions: torch.Tensor
    ) -> list[Prefill]:
        prefills = []
        for chunk in chunks:
            length = chunk.request.computed + chunk.count
            stop = row + chunk.count
            context = torch.arange(length, device=self.device)
            mask = context <= positions[row:stop].unsqueeze(-1)
            prefills.append(Prefill(row, stop, slots[:length], mask))
            slots = slots[len(chunk.request.block_ids) * self.block_size :]
            row = stop
        return prefills

    def close(self) -> None:
        """Let go of the model and the KV pool. Again does nothing more."""
        self.model = None
        self.kv = None
