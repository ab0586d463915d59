"""Load a model that only transformers implements, with this engine's attention.

Import this module only if it is needed, because this takes seconds.
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
    count_tensor_dtypes,
    format_shape_mismatch,
    loses_precision,
    raise_for_invalid_tensors,
    warn_about_rounding,
)
from plimsoll_engine.models.transformers_model import TransformersModel


def import_model_code(config: Any) -> None:
    """Import all modules of the model with the config ``config``, before processes are forked."""
    transformers_model.register_attention()
    with contextlib.suppress(KeyError, ValueError):
        AutoModelForCausalLM._model_mapping[type(config)]


def load_transformers_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Load the model in ``folder`` to ``device``, and check that it works with the KV pool.

    Raises LoadError if the model is not supported.
    """
    if getattr(config, "attention_chunk_size", None):
        raise LoadError(
            f"{folder / 'config.json'}: field attention_chunk_size must not be set, because "
            "chunked attention is not supported"
        )
    transformers_model.register_attention()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    types = count_tensor_dtypes(folder)
    warn_about_rounding(folder, {t: n for t, n in types.items() if loses_precision(t, dtype)})
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=transformers_model.ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # info lists them by name
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise LoadError(f"{folder}: {error}") from None
    # A mismatched key is (name, shape in the file, shape in the model).
    raise_for_invalid_tensors(
        folder,
        missing=info.get("missing_keys") or (),
        mismatched=[format_shape_mismatch(*key) for key in info.get("mismatched_keys") or ()],
        unexpected=info.get("unexpected_keys") or (),
    )
    module.requires_grad_(False)
    model = TransformersModel(module.eval().to(device))
    try:
        _check_results(folder, model)
    except BaseException:
        model.close()
        raise
    return model


def _check_results(folder: Path, model: TransformersModel) -> None:
    model_type = f"{folder / 'config.json'}: model_type {model.module.config.model_type}"
    try:
        difference = self_check.measure_difference(model)
    except Exception as error:  # noqa: BLE001 - a model may raise anything
        raise LoadError(f"{model_type} cannot run on the paged KV cache: {error!r}") from None
    if not difference <= self_check.MAX_RELATIVE_DIFFERENCES[model.dtype]:
        raise LoadError(
            f"{model_type} is not supported: on the paged KV cache its logits differ from "
            f"transformers' own by {difference:.2g}, so it needs more state than keys and values"
        )
