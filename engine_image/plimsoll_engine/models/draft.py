"""Load the draft model for speculative decoding, and merge its tensors with the target model's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from plimsoll_engine.errors import LoadError
from plimsoll_engine.models import decoder, loader
from plimsoll_engine.models.decoder import Decoder

# In a buffer that both models share.
DRAFT_PREFIX = "draft."


def build_draft_model(folder: Path, dtype: torch.dtype) -> Decoder:
    """Return the draft model in ``folder`` on the meta device. Raises LoadError."""
    config = loader.load_config(folder)
    if not decoder.supports(config):
        raise LoadError(
            f"{folder / 'config.json'}: model_type {config.model_type} is not supported for "
            f"draft models: use one of {', '.join(decoder.SUPPORTED_MODEL_TYPES)}"
        )
    try:
        return Decoder(config, dtype, quantization=loader.read_quantization(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{folder / 'config.json'}: {error}") from None


def load_draft_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load the draft model in ``folder`` to ``device``. Raises LoadError."""
    model = build_draft_model(folder, dtype)
    tensors = model.get_parameters()
    loader.bind_tensors(
        model, {name: torch.empty_like(t, device=device) for name, t in tensors.items()}
    )
    try:
        loader.load_tensors(model, folder)
    except BaseException:
        model.close()
        raise
    return model


def merge_tensors(
    tensors: Mapping[str, torch.Tensor], draft: Decoder | None
) -> dict[str, torch.Tensor]:
    """Return ``tensors``, and those of ``draft`` under names that begin with DRAFT_PREFIX."""
    draft_tensors = {} if draft is None else draft.get_parameters()
    return {**tensors, **{DRAFT_PREFIX + name: tensor for name, tensor in draft_tensors.items()}}


def split_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the target model's and the draft model's tensors, as before :func:`merge_tensors`."""
    drafts = {
        name.removeprefix(DRAFT_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(DRAFT_PREFIX)
    }
    return {n: t for n, t in tensors.items() if not n.startswith(DRAFT_PREFIX)}, drafts
