"""The smaller model that drafts tokens: its checkpoint, and its tensors beside the large one's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from plimsoll_engine.errors import LoadError
from plimsoll_engine.models import decoder, loader
from plimsoll_engine.models.decoder import Decoder

PREFIX = "draft."
"""Before its tensors' names, where both models lie in one buffer."""


def build(folder: Path, dtype: torch.dtype) -> Decoder:
    """Return the model in ``folder`` with its tensors on the meta device. Raises LoadError."""
    config = loader.load_config(folder)
    if not decoder.supports(config):
        raise LoadError(
            f"{folder / 'config.json'}: field model_type: {config.model_type} cannot draft tokens,"
            f" only text models of {', '.join(decoder.FAMILY)}"
        )
    try:
        return Decoder(config, dtype, quantization=loader.quantization_of(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{folder / 'config.json'}: {error}") from None


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return the model on ``device``, from the checkpoint's files. Raises LoadError."""
    model = build(folder, dtype)
    tensors = model.parameters_by_name()
    loader.bind(model, {name: torch.empty_like(t, device=device) for name, t in tensors.items()})
    try:
        loader.fill(model, folder)
    except BaseException:
        model.close()
        raise
    return model


def beside(tensors: Mapping[str, torch.Tensor], draft: Decoder | None) -> dict[str, torch.Tensor]:
    """Return ``tensors`` with those of ``draft``, under names that no other has."""
    own = {} if draft is None else draft.parameters_by_name()
    return {**tensors, **{PREFIX + name: tensor for name, tensor in own.items()}}


def apart(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of the large model and those of the draft model, by their own names."""
    drafts = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }
    return {n: t for n, t in tensors.items() if not n.startswith(PREFIX)}, drafts
