"""What the runner needs of a model, and what a step tells it.

A step's rows are flattened into one sequence of tokens: first the decode rows (one token each),
then the prefill chunks. Each layer writes its new keys and values to their slots in the KV pool and
reads every sequence's context back by its block table. The plan of a step is handed through the
forward pass, so no module and no global holds the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from plimsoll_engine.kernels.step_plan import KVShape, StepPlan
from plimsoll_engine.messages.worker_ipc import Media


class Model(Protocol):
    """A causal language model on the paged KV pool."""

    kv: KVShape

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input embeddings [tokens, hidden] of ``ids`` [tokens]."""
        ...

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states [tokens, hidden], normalised, of ``ids`` int64 [tokens].

        They are at ``positions`` int64 [tokens]. ``embeds`` [tokens, hidden] take the place of
        ``embed(ids)``. The dtype is the model's. Where ``plan.needed`` names rows, the hidden
        states are those rows', in their order.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next token's scores [rows, vocabulary] of ``hidden`` [rows, hidden]."""
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
        """Return the output of each, [media.tokens, ...] in the model's dtype.

        ValueError names one that does not fit.
        """
        ...

    def example(self) -> Media:
        """One of the largest media there are, for the warm-up; its start is 0."""
        ...
