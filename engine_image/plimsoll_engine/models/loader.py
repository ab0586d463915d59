"""Load a model from a local folder, as a model of this engine or of transformers.

:func:`load_model` does this in one step. The weight server does it in three: :func:`build` returns
a model on the meta device, :func:`bind` sets its tensors, and :func:`fill` reads the files into
them.
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

from plimsoll_engine.distributed.group import FLAG, WHOLE, Shard
from plimsoll_engine.errors import LoadError
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.models import decoder, quantization, rope
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.decoder_parts import SCALE, Part
from plimsoll_engine.models.model import Model
from plimsoll_engine.models.quantization import Quantization
from plimsoll_engine.models.safetensors_files import (
    EIGHT_BITS,
    FLOATS,
    INDEX,
    find_mismatch,
    list_weight_files,
    loses_precision,
    open_safetensors,
    raise_for_tensors,
    read_index,
    warn_of_rounding,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NOT_READ = (".rotary_emb.inv_freq", ".embeddings.position_ids")
"""Suffixes of checkpoint tensors that are not loaded, because the config implies their values."""
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""RoPE types whose result depends on the longest sequence of a batch, so keys cannot be cached."""


class OwnModel(Model, Protocol):
    """Model that this engine implements. The caller provides its tensors and fills them.

    ``parts`` maps the name of each tensor to the checkpoint tensors that it concatenates, under the
    names that :meth:`normalize_name` returns.
    """

    parts: dict[str, Part]

    @property
    def ignored_tensors(self) -> frozenset[str]:
        """Normalised names of checkpoint tensors that are not loaded."""

    def normalize_name(self, name: str) -> str:
        """Return the name that ``parts`` uses for the checkpoint tensor ``name``."""

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Use ``tensors`` as weights. Their names, shapes and dtypes must match ``parts``."""


OTHERS = {"llava": "llava", "whisper": "whisper"}
"""Modules of the multimodal models, by model type.

They import transformers' model code, which takes seconds, so each is imported only when needed.
"""


def import_code(folder: Path) -> None:
    """Import all code that the model in ``folder`` needs, before a process forks.

    An unreadable config is ignored here, because loading the model reports it.
    """
    with contextlib.suppress(LoadError):
        config = load_config(folder)
        if config.model_type in OTHERS:
            importlib.import_module(f"plimsoll_engine.models.{OTHERS[config.model_type]}")
        elif not decoder.supports(get_text_config(config)):
            from plimsoll_engine.models import transformers_loader

            transformers_loader.import_code(config)


def choose_device(name: str, shard: Shard = WHOLE) -> torch.device:
    """Return the device for the ``--device`` value ``auto``, ``cpu`` or ``cuda``.

    With several ranks, rank r gets CUDA device r. Raises LoadError.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise LoadError(f"--device {name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError("--device cuda: no CUDA device is visible; use cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if shard.size > (count := torch.cuda.device_count()):
        raise LoadError(
            f"{FLAG} {shard.size}: only {count} CUDA devices are visible; use at most {count}"
        )
    return torch.device("cuda", torch.cuda.current_device() if shard == WHOLE else shard.rank)


def load_config(folder: Path) -> Any:
    """Return the transformers config in ``folder``. Raises LoadError if it is not supported."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise LoadError(f"model {folder}: no such folder; pass the folder of a checkpoint")
    if not path.is_file():
        raise LoadError(f"{path}: no such file; every checkpoint must contain it")
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
            f"{path}: field {quantization.FIELD}: quantized weights are not supported for "
            f"model_type {config.model_type}, only for {', '.join(decoder.FAMILY)}"
        )
    if config.model_type == "whisper":
        return config
    text = get_text_config(config)
    for field in NEEDED:
        if not isinstance(getattr(text, field, None), int):
            raise LoadError(
                f"{path}: field {field} is missing; the engine needs the config of a "
                "decoder-only model"
            )
    if (kind := rope.get_rope_type(text)) in LENGTH_DEPENDENT:
        raise LoadError(f"{path}: field rope_parameters.rope_type: {kind} is not supported")
    return config


def read_quantization(config: Any) -> Quantization | None:
    """Return the quantization of a config's weights, or None if they are not quantized.

    Raises ValueError that names an unsupported field.
    """
    value = getattr(config, quantization.FIELD, None)
    return quantization.read(value, bool(getattr(config, "tie_word_embeddings", False)))


def get_text_config(config: Any) -> Any:
    """Return the decoder's config, which may be nested in a multimodal model's config."""
    return config.text_config if config.model_type == "llava" else config


def get_max_context_length(config: Any) -> int:
    """Return the maximum number of tokens in the decoder's context."""
    if config.model_type == "whisper":
        return int(config.max_target_positions)
    return int(get_text_config(config).max_position_embeddings)


def choose_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype that the flag ``--dtype`` selects.

    ``auto`` means float32 on a CPU. On CUDA it means bfloat16, or float32 if the config says so.
    Converting a float16 checkpoint to bfloat16 loses precision, which :func:`fill` logs.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise LoadError(f"--dtype {name!r}: expected auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    return torch.float32 if config.dtype == torch.float32 else torch.bfloat16


def build(folder: Path, config: Any, dtype: torch.dtype, shard: Shard = WHOLE) -> OwnModel | None:
    """Return this engine's model on the meta device; None if only transformers implements it.

    With several ranks, it is the rank's shard. ``folder`` is named in errors. Raises LoadError.
    """
    try:
        if shard != WHOLE and not decoder.supports(config):
            raise ValueError(
                f"{FLAG} {shard.size}: field model_type: {config.model_type} supports only one "
                f"rank; use {FLAG} 1, or a model of {', '.join(decoder.FAMILY)}"
            )
        if config.model_type == "whisper":
            from plimsoll_engine.models.whisper import WhisperModel

            return WhisperModel(config, dtype)
        if not decoder.supports(get_text_config(config)):
            if config.model_type == "llava":
                raise ValueError(
                    "field text_config: unsupported text model; supported are Llama, Mistral and "
                    "Qwen"
                )
            return None
        if config.model_type == "llava":
            from plimsoll_engine.models.llava import LlavaModel

            return LlavaModel(config, dtype)
        return Decoder(config, dtype, shard, read_quantization(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{folder / 'config.json'}: {error}") from None


def bind(model: OwnModel, tensors: dict[str, torch.Tensor]) -> None:
    """Use ``tensors``, without copying them, as the weights of ``model``.

    Raises ValueError that names the first tensor that does not fit.
    """
    model.bind(tensors)


def fill(model: OwnModel, folder: Path) -> None:
    """Copy the tensors of the checkpoint in ``folder`` into those of ``model``.

    Raises LoadError if a tensor is missing, unknown, or has a wrong shape or dtype.
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
                    if normalized not in model.ignored_tensors and not name.endswith(NOT_READ):
                        unexpected.append(f"{name} in {path.name}")
                    continue
                missing.discard(normalized)
                target, part = targets[normalized]
                stored = file.get_slice(name)
                expected = part.get_source_shape(tuple(target.shape))
                where = f"{name} in {path.name}"
                if mismatch := find_mismatch(
                    where, stored, expected, EIGHT_BITS if part.dtype == FP8 else FLOATS
                ):
                    mismatched.append(mismatch)
                    continue
                if loses_precision(stored.get_dtype(), target.dtype):
                    rounded[stored.get_dtype()] += 1
                if part.split is None or part.shard == WHOLE:
                    target.copy_(file.get_tensor(name))
                else:
                    target.copy_(stored[part.get_source_slices(tuple(target.shape))])
                if normalized.endswith(SCALE) and not bool(
                    (target.isfinite() & (target >= 0)).all()
                ):
                    mismatched.append(f"{where} contains a negative or non-finite scale")
    places = {model.normalize_name(name): file for name, file in read_index(folder).items()}
    raise_for_tensors(
        folder,
        missing=[
            f"{n} (which {INDEX} places in {places[n]})" if n in places else n for n in missing
        ],
        mismatched=mismatched,
        unexpected=unexpected,
    )
    warn_of_rounding(folder, rounded)


def load_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> Model:
    """Return the model in ``folder``, or one rank's shard of it, with its weights on ``device``."""
    model = build(folder, config, dtype, shard)
    if model is None:
        from plimsoll_engine.models import transformers_loader

        return transformers_loader.load(folder, config, dtype, device)
    tensors = model.get_parameters()
    bind(model, {name: torch.empty_like(t, device=device) for name, t in tensors.items()})
    try:
        fill(model, folder)
    except BaseException:
        model.close()
        raise
    return model
