"""Load a model from a local folder.

:func:`load_model` does all. The weight server calls its steps: :func:`build_model`,
:func:`bind_tensors` and :func:`load_tensors`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from plimsoll_engine.distributed.group import RANKS_FLAG, WHOLE_MODEL, Shard
from plimsoll_engine.errors import LoadError
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.models import decoder, quantization, rope
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.decoder_parts import SCALE_SUFFIX, Part
from plimsoll_engine.models.model import Model
from plimsoll_engine.models.quantization import Quantization
from plimsoll_engine.models.safetensors_files import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    INDEX_FILE,
    find_mismatch,
    list_weight_files,
    loses_precision,
    open_safetensors,
    raise_for_invalid_tensors,
    read_weight_map,
    warn_about_rounding,
)

DTYPES_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Not loaded, because the config implies their values.
IGNORED_TENSOR_SUFFIXES = (".rotary_emb.inv_freq", ".embeddings.position_ids")
REQUIRED_CONFIG_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "max_position_embeddings",
)
# Not supported: their keys depend on other sequences in the batch.
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


class NativeModel(Model, Protocol):
    """Model that this engine implements, with tensors that the caller allocates and loads.

    ``parts`` maps the name of each tensor to the checkpoint tensors that it concatenates.
    """

    parts: dict[str, Part]

    @property
    def ignored_tensors(self) -> frozenset[str]:
        """Names, as in ``parts``, of checkpoint tensors that are not loaded."""

    def normalize_name(self, name: str) -> str:
        """Return the name in ``parts`` of the checkpoint tensor ``name``."""

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Use ``tensors``, with the names, shapes and dtypes of ``parts``, as weights."""


# Imported only if needed, because transformers' model code takes seconds to import.
MULTIMODAL_MODULES = {"llava": "llava", "whisper": "whisper"}


def import_model_code(folder: Path) -> None:
    """Import all code that the model in ``folder`` needs, before processes are forked."""
    with contextlib.suppress(LoadError):
        config = load_config(folder)
        if config.model_type in MULTIMODAL_MODULES:
            importlib.import_module(
                f"plimsoll_engine.models.{MULTIMODAL_MODULES[config.model_type]}"
            )
        elif not decoder.supports(get_text_config(config)):
            from plimsoll_engine.models import transformers_loader

            transformers_loader.import_model_code(config)


def choose_device(name: str, shard: Shard = WHOLE_MODEL) -> torch.device:
    """Return the device for a value of ``--device``: ``auto``, ``cpu`` or ``cuda``.

    Rank r gets CUDA device r. Raises LoadError if the device does not exist.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise LoadError(f"--device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError(
            "--device cuda requires a CUDA device, but none is visible: use cpu or auto"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if shard.size > (count := torch.cuda.device_count()):
        raise LoadError(
            f"{RANKS_FLAG} is {shard.size}, but only {count} CUDA devices are visible: use "
            f"at most {count}"
        )
    return torch.device("cuda", torch.cuda.current_device() if shard == WHOLE_MODEL else shard.rank)


def load_config(folder: Path) -> Any:
    """Return the transformers config in ``folder``.

    Raises LoadError if there is no config, or if the model is not supported.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise LoadError(f"the model folder {folder} does not exist: use the folder of a checkpoint")
    if not path.is_file():
        raise LoadError(f"{path} does not exist, but every checkpoint must contain it")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise LoadError(f"{path}: {error}") from None
    try:
        quantized = read_quantization(config)
    except ValueError as error:
        raise LoadError(
            f"{path}: {error}; use a checkpoint in float32, float16, bfloat16 or "
            "compressed-tensors FP8"
        ) from None
    if quantized is not None and not decoder.supports(config):
        raise LoadError(
            f"{path}: field {quantization.CONFIG_FIELD} specifies quantized weights, which "
            f"are not supported for model_type {config.model_type}, only for "
            f"{', '.join(decoder.SUPPORTED_MODEL_TYPES)}"
        )
    if config.model_type == "whisper":
        return config
    text = get_text_config(config)
    for field in REQUIRED_CONFIG_FIELDS:
        if not isinstance(getattr(text, field, None), int):
            raise LoadError(
                f"{path}: field {field} is missing, but the engine needs the config of a "
                "decoder-only model"
            )
    if (kind := rope.get_rope_type(text)) in LENGTH_DEPENDENT_ROPE_TYPES:
        raise LoadError(f"{path}: field rope_parameters.rope_type has the unsupported value {kind}")
    return config


def read_quantization(config: Any) -> Quantization | None:
    """Return the quantization of the weights; None if they are not quantized.

    Raises ValueError, naming the field, if a field is not supported.
    """
    value = getattr(config, quantization.CONFIG_FIELD, None)
    return quantization.parse_config(value, bool(getattr(config, "tie_word_embeddings", False)))


def get_text_config(config: Any) -> Any:
    """Return the decoder's config, which multimodal configs contain."""
    return config.text_config if config.model_type == "llava" else config


def get_max_context_length(config: Any) -> int:
    """Return the decoder's maximum context length in tokens."""
    if config.model_type == "whisper":
        return int(config.max_target_positions)
    return int(get_text_config(config).max_position_embeddings)


def choose_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype for a value of ``--dtype``.

    ``auto`` is float32 on a CPU. On CUDA, it is float32 if the config says so, and bfloat16
    otherwise. Raises LoadError.
    """
    if name in DTYPES_BY_NAME:
        return DTYPES_BY_NAME[name]
    if name != "auto":
        raise LoadError(f"--dtype must be auto, {', '.join(DTYPES_BY_NAME)}, got {name!r}")
    if device.type == "cpu":
        return torch.float32
    return torch.float32 if config.dtype == torch.float32 else torch.bfloat16


def build_model(
    folder: Path, config: Any, dtype: torch.dtype, shard: Shard = WHOLE_MODEL
) -> NativeModel | None:
    """Return this engine's model on the meta device; None if only transformers implements it.

    Raises LoadError, naming ``folder``, if the model is not supported.
    """
    try:
        if shard != WHOLE_MODEL and not decoder.supports(config):
            raise ValueError(
                f"models of type {config.model_type} support only one rank: use {RANKS_FLAG} "
                f"1 instead of {shard.size}, or a model of "
                f"{', '.join(decoder.SUPPORTED_MODEL_TYPES)}"
            )
        if config.model_type == "whisper":
            from plimsoll_engine.models.whisper import WhisperModel

            return WhisperModel(config, dtype)
        if not decoder.supports(get_text_config(config)):
            if config.model_type == "llava":
                raise ValueError(
                    "field text_config has an unsupported text model: use a model with "
                    "Llama, Mistral or Qwen"
                )
            return None
        if config.model_type == "llava":
            from plimsoll_engine.models.llava import LlavaModel

            return LlavaModel(config, dtype)
        return Decoder(config, dtype, shard, read_quantization(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{folder / 'config.json'}: {error}") from None


def bind_tensors(model: NativeModel, tensors: dict[str, torch.Tensor]) -> None:
    """Use ``tensors`` as the weights of ``model``, without copying them.

    Raises ValueError, naming the first tensor that does not match.
    """
    model.bind(tensors)


def load_tensors(model: NativeModel, folder: Path) -> None:
    """Copy the checkpoint in ``folder`` into the tensors of ``model``.

    Raises LoadError if a checkpoint tensor is missing or unknown, or has a wrong shape or dtype.
    """
    targets = {
        source: (target, model.parts[name])
        for name, tensor in model.get_parameters().items()
        for (source, rows), target in zip(
            model.parts[name].sources,
            torch.split(tensor, [rows for _, rows in model.parts[name].sources]),
            strict=True,
        )
    }
    missing, unexpected, mismatched = set(targets), [], []
    rounded: Counter[str] = Counter()
    for path in list_weight_files(folder):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                normalized = model.normalize_name(name)
                if normalized not in targets:
                    if normalized not in model.ignored_tensors and not name.endswith(
                        IGNORED_TENSOR_SUFFIXES
                    ):
                        unexpected.append(f"{name} in {path.name}")
                    continue
                missing.discard(normalized)
                target, part = targets[normalized]
                stored = file.get_slice(name)
                expected = part.get_source_shape(tuple(target.shape))
                where = f"{name} in {path.name}"
                if mismatch := find_mismatch(
                    where, stored, expected, FP8_DTYPES if part.dtype == FP8 else FLOAT_DTYPES
                ):
                    mismatched.append(mismatch)
                    continue
                if loses_precision(stored.get_dtype(), target.dtype):
                    rounded[stored.get_dtype()] += 1
                if part.split is None or part.shard == WHOLE_MODEL:
                    target.copy_(file.get_tensor(name))
                else:
                    target.copy_(stored[part.get_source_slices(tuple(target.shape))])
                if normalized.endswith(SCALE_SUFFIX) and not bool(
                    (target.isfinite() & (target >= 0)).all()
                ):
                    mismatched.append(f"{where} contains a negative or non-finite scale")
    places = {model.normalize_name(name): file for name, file in read_weight_map(folder).items()}
    raise_for_invalid_tensors(
        folder,
        missing=[
            f"{n} (which {INDEX_FILE} places in {places[n]})" if n in places else n for n in missing
        ],
        mismatched=mismatched,
        unexpected=unexpected,
    )
    warn_about_rounding(folder, rounded)


def load_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE_MODEL
) -> Model:
    """Load the model in ``folder``, or its ``shard``, to ``device``. Raises LoadError."""
    model = build_model(folder, config, dtype, shard)
    if model is None:
        from plimsoll_engine.models import transformers_loader

        return transformers_loader.load_transformers_model(folder, config, dtype, device)
    tensors = model.get_parameters()
    bind_tensors(model, {name: torch.empty_like(t, device=device) for name, t in tensors.items()})
    try:
        load_tensors(model, folder)
    except BaseException:
        model.close()
        raise
    return model
