"""A model that only transformers has: its module, its own loading, our attention.

Importing this takes seconds, so nobody does who has a model of ours.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from plimsoll_engine.errors import LoadError
from plimsoll_engine.models import self_check, transformers_model
from plimsoll_engine.models.safetensors_files import (
    check_files,
    complain,
    loses_digits,
    shapes,
    warn_of_rounding,
)
from plimsoll_engine.models.transformers_model import TransformersModel


def import_code(config: Any) -> None:
    """Import the modules of this model, for a process that others are forked from."""
    transformers_model.register()
    with contextlib.suppress(KeyError, ValueError):
        AutoModelForCausalLM._model_mapping[type(config)]


def load(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> TransformersModel:
    """Any causal model of transformers on ``device``, checked. Raises :class:`LoadError`."""
    if getattr(config, "attention_chunk_size", None):
        raise LoadError(
            f"{folder / 'config.json'}: field attention_chunk_size: attention in chunks of the "
            "context is not supported"
        )
    transformers_model.register()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    types = check_files(folder)
    warn_of_rounding(folder, {t: n for t, n in types.items() if loses_digits(t, dtype)})
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=transformers_model.NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed in info, by name
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise LoadError(f"{folder}: {error}") from None
    # A mismatched one is (name, shape in the file, shape in the model).
    complain(
        folder,
        missing=info.get("missing_keys") or (),
        mismatched=[shapes(*key) for key in info.get("mismatched_keys") or ()],
        unexpected=info.get("unexpected_keys") or (),
    )
    module.requires_grad_(False)
    model = TransformersModel(module.eval().to(device))
    try:
        _check_itself(folder, model)
    except BaseException:
        model.close()
        raise
    return model


def _check_itself(folder: Path, model: TransformersModel) -> None:
    """Refuse an architecture whose results on the paged cache are not transformers' own."""
    what = f"{folder / 'config.json'}: model_type {model.module.config.model_type}"
    try:
        off = self_check.difference(model)
    except Exception as error:  # noqa: BLE001 - whatever a model raises, the file is named
        raise LoadError(f"{what}: cannot be computed on the paged cache: {error!r}") from None
    if not off <= self_check.TOLERANCE[model.dtype]:
        raise LoadError(
            f"{what}: its results on the paged cache differ from transformers' own (by {off:.2g}):"
            " it needs more than keys and values, and is not supported"
        )
