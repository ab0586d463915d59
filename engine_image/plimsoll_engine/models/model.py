"""Interfaces of models, as the runner uses them."""

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
        """Return the final normalised hidden states [tokens, hidden] of ``ids`` int64 [tokens].

        ``positions`` int64 [tokens] are the tokens' positions. ``embeds`` [tokens, hidden] replace
        ``embed(ids)``. The result has the model's dtype. If ``plan.needed`` lists rows, only these
        rows are returned, in that order.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of ``hidden`` [rows, hidden]."""
        ...

    def get_parameters(self) -> dict[str, torch.Tensor]:
        """Return every tensor from the checkpoint by name; a tied tensor occurs once."""
        ...

    def close(self) -> None:
        """Release all tensors. Idempotent."""
        ...


@runtime_checkable
class MediaModel(Model, Protocol):
    """Model with an encoder for images or audio.

    If ``lifelong``, all tokens attend to the encoder's output (encoder-decoder), so a request holds
    it until it ends. Otherwise the output replaces placeholder tokens. ``output_bytes`` is the size
    of one token's output.
    """

    lifelong: bool
    output_bytes: int

    def encode(self, media: Sequence[Media]) -> list[torch.Tensor]:
        """Return the encoder's output for each item: [media.tokens, ...] in the model's dtype.

        Raises ValueError that names an item that does not fit.
        """
        ...

    def make_dummy_media(self) -> Media:
        """Return media of the maximum size for the warm-up, at position 0."""
        ...
