"""Interfaces of models for the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from plimsoll_engine.kernels.step_plan import KVShape, StepPlan
from plimsoll_engine.messages.worker_ipc import Media


class Model(Protocol):
    """Causal language model with the paged KV pool."""

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
        """Return the final normalised hidden states [tokens, hidden] of ``ids`` int64 [tokens].

        ``embeds`` [tokens, hidden] replaces ``embed(ids)``, if given. The result has the model's
        dtype, and only the rows in ``plan.needed`` unless that is None.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of ``hidden`` [rows, hidden]."""
        ...

    def get_parameters(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name. A tied tensor occurs once."""
        ...

    def close(self) -> None:
        """Release all tensors. Idempotent."""
        ...


@runtime_checkable
class MediaModel(Model, Protocol):
    """Model with an encoder for images or audio.

    In an encoder-decoder model, all tokens of a request attend to the encoder's output. In other
    models, the output replaces the embeddings of placeholder tokens.
    """

    is_encoder_decoder: bool
    output_bytes: int

    def encode(self, media: Sequence[Media]) -> list[torch.Tensor]:
        """Return the encoder's output [item.tokens, ...] for each item, in the model's dtype.

        Raises ValueError if an item has a wrong shape or dtype.
        """
        ...

    def make_dummy_media(self) -> Media:
        """Return an image or audio clip of the maximum size for the warm-up."""
        ...
