"""What the runner needs of a model, and what a step tells it.

A step's rows are flattened into one sequence of tokens: first the decode rows (one token each),
then the prefill chunks. Each layer writes its new keys and values to their slots in the KV pool and
reads every sequence's context back by its block table. The plan of a step is handed through the
forward pass, so no module and no global holds the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from plimsoll_engine.ipc import Media
from plimsoll_engine.models.lora import StepAdapters


class KVShape(NamedTuple):
    """What one token's keys (and its values) are: ``layers`` x ``heads`` x ``dim`` elements."""

    layers: int
    heads: int
    dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values together."""
        return 2 * self.layers * self.heads * self.dim * dtype.itemsize


@dataclass(slots=True)
class StepPlan:
    """Where a step reads and writes the pool, the same for every layer.

    ``keys`` and ``values`` are [layers, slots, kv heads, dim]; slot ``b * block_size + i`` is token
    i of block b. ``write_slots`` int64 [tokens] are the slots of the step's tokens, negative for
    padding rows. ``tables`` int32 [sequences, width] are the block numbers of each sequence,
    ``contexts`` int32 [sequences] its tokens, the step's included (0 for padding), and ``starts``
    int32 [sequences + 1] its first row. The first ``decodes`` sequences have one row each;
    ``longest`` is the most rows of any other. ``fresh`` are the rows of the last sequences, those
    whose whole context is in the step, shortest first. ``derived`` is the backend's own: what it
    computes once a step, or has of a layer's rows until it attends to them. ``attended`` holds for
    each sequence what its rows attend to beside the pool, in models with an encoder for that;
    ``adapters`` are those of its requests, if any. ``context_limit`` is the most tokens that a
    context of this engine may have, 0 where nobody has said.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int
    write_slots: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    starts: torch.Tensor
    decodes: int
    longest: int = 0
    fresh: tuple[int, ...] = ()
    derived: Any = None
    attended: list[tuple[int, torch.Tensor]] | None = None
    adapters: StepAdapters | None = None
    context_limit: int = 0


class Model(Protocol):
    """A causal language model on the paged KV pool."""

    kv: KVShape

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The input embeddings [tokens, hidden] of ``ids`` [tokens]."""
        ...

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last hidden states [tokens, hidden], normalised, of ``ids`` [tokens] at ``positions``
        int64 [tokens]. ``embeds`` [tokens, hidden] take the place of ``embed(ids)``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next token's scores [rows, vocabulary] of ``hidden`` [rows, hidden]."""
        ...

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        """Every tensor of the model that comes from a checkpoint, tied ones once."""
        ...

    def close(self) -> None:
        """Let go of every tensor. Again does nothing more."""
        ...


@runtime_checkable
class MediaModel(Model, Protocol):
    """A model with an encoder for images or sounds.

    ``lifelong`` says that every token attends to the output (encoder-decoder), so that a request
    needs it until it ends; otherwise the output takes the place of placeholder tokens.
    ``output_bytes`` is the size of one token of output.
    """

    lifelong: bool
    output_bytes: int

    def encode(self, media: Sequence[Media]) -> list[torch.Tensor]:
        """The output of each, [media.tokens, ...]; ValueError names one that does not fit."""
        ...

    def example(self) -> Media:
        """One of the largest media there are, for the warm-up; its start is 0."""
        ...
