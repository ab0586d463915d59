"""Interfaces of models, as the runner uses them.

:mod:`plimsoll_engine.kernels.step_plan` describes the plan of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from plimsoll_engine.kernels.step_plan import KVShape, StepPlan
from plimsoll_engine.messages.worker_ipc import Media


class Model(Protocol):
    """Causal language model on the paged KV pool."""

    kv: KVShape

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""

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
        """Return the last normalised hidden states [tokens, hidden] of ``ids`` int64 [tokens].

        Tokens are at ``positions`` int64 [tokens]. ``embeds`` [tokens, hidden] replace
        ``embed(ids)``. The result has the model's dtype. If ``plan.needed`` lists rows, it has only
        those rows, in their order.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of ``hidden`` [rows, hidden]."""
        ...

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        """Return every tensor that comes from a checkpoint, tied ones once."""
        ...

    def close(self) -> None:
        """Release every tensor. Idempotent."""
        ...


@runtime_checkable
class MediaModel(Model, Protocol):
    """Model with an encoder for images or audio.

    ``lifelong`` means that every token attends to the encoder's output (encoder-decoder), so that a
    request needs it until it ends. Otherwise the output replaces placeholder tokens.
    ``output_bytes`` is the size of one token of output.
    """

    lifelong: bool
    output_bytes: int

    def encode(self, media: Sequence[Media]) -> list[torch.Tensor]:
        """Return the output of each of ``media``, [media.tokens, ...] in the model's dtype.

        Raises ValueError with an item that does not fit.
        """
        ...

    def example(self) -> Media:
        """Return media of the maximum size, for the warm-up. Its start is 0."""
        ...
