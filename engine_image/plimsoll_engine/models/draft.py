"""Load the draft model for speculative decoding, and merge its tensors with the target's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from plimsoll_engine.errors import LoadError
from plimsoll_engine.models import decoder, loader
from plimsoll_engine.models.decoder import Decoder

PREFIX = "draft."
"""Prefix of the draft model's tensors in a buffer that both models share."""


def build(folder: Path, dtype: torch.dtype) -> Decoder:
    """Return the draft model in ``folder``, with tensors on the meta device. Raises LoadError."""
    config = loader.load_config(folder)
    if not decoder.supports(config):
        raise LoadError(
            f"{folder / 'config.json'}: field model_type: {config.model_type} is not supported "
            f"as a draft model; supported are {', '.join(decoder.FAMILY)}"
        )
    try:
        return Decoder(config, dtype, quantization=loader.read_quantization(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{folder / 'config.json'}: {error}") from None


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load the draft model in ``folder`` to ``device``. Raises LoadError."""
    model = build(folder, dtype)
    tensors = model.get_parameters()
    loader.bind(model, {name: torch.empty_like(t, device=device) for name, t in tensors.items()})
    try:
        loader.fill(model, folder)
    except BaseException:
        model.close()
        raise
    return model


def merge_tensors(
    tensors: Mapping[str, torch.Tensor], draft: Decoder | None
) -> dict[str, torch.Tensor]:
    """Return ``tensors`` and those of ``draft``, whose names get the prefix :data:`PREFIX`."""
    draft_tensors = {} if draft is None else draft.get_parameters()
    return {**tensors, **{PREFIX + name: tensor for name, tensor in draft_tensors.items()}}


def split_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of the target model and those of the draft model, without the prefix."""
    drafts = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }
    return {n: t for n, t in tensors.items() if not n.startswith(PREFIX)}, drafts
