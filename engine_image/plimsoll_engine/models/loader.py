"""Loading of a model from a local folder, by this engine's decoder or by transformers.

The weight server takes the steps one by one: :func:`build` on the meta device, :func:`bind` to its
own tensors, and :func:`fill` these from the files.
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
    files_by_tensor,
    loses_digits,
    mismatch,
    open_safetensors,
    raise_for_tensors,
    warn_of_rounding,
    weight_files,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NOT_READ = (".rotary_emb.inv_freq", ".embeddings.position_ids")
"""Suffixes of tensors in old checkpoints that repeat what the config says."""
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotations that depend on the longest sequence of a batch, so that keys cannot be cached."""


class OwnModel(Model, Protocol):
    """Model of this engine, whose tensors are bound and filled from outside.

    ``parts`` maps each tensor's name to the checkpoint tensors that it concatenates, by their
    ``canonical`` names. Those in ``ignored`` are not read.
    """

    parts: dict[str, Part]

    @property
    def ignored(self) -> frozenset[str]:
        """Canonical names in checkpoints that the model does not use."""

    def canonical(self, name: str) -> str:
        """Return the name in ``parts`` of the checkpoint tensor ``name``."""

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Use ``tensors``, with shapes and dtypes of ``parts``, as weights."""


OTHERS = {"llava": "llava", "whisper": "whisper"}
"""Modules of other models by model type.

They import model code of transformers, which takes seconds, so they are imported only when needed.
"""


def import_code(folder: Path) -> None:
    """Import everything that the model in ``folder`` needs, before a process forks.

    Does nothing if the config cannot be read: loading reports why.
    """
    with contextlib.suppress(LoadError):
        config = load_config(folder)
        if config.model_type in OTHERS:
            importlib.import_module(f"plimsoll_engine.models.{OTHERS[config.model_type]}")
        elif not decoder.supports(text_config(config)):
            from plimsoll_engine.models import transformers_loader

            transformers_loader.import_code(config)


def choose_device(name: str, shard: Shard = WHOLE) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``. With several ranks, rank r has device r.

    Raises LoadError.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise LoadError(f"device {name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError("device cuda: no CUDA device is visible; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if shard.size > (count := torch.cuda.device_count()):
        raise LoadError(
            f"{FLAG} {shard.size}: {count} CUDA devices are visible; use at most {count}"
        )
    return torch.device("cuda", torch.cuda.current_device() if shard == WHOLE else shard.rank)


def load_config(folder: Path) -> Any:
    """Return the model's config. Raises LoadError if the engine does not support it."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise LoadError(f"model {folder}: no such folder")
    if not path.is_file():
        raise LoadError(f"{path}: no such file; a checkpoint folder needs config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise LoadError(f"{path}: {error}") from None
    try:
        quantized = quantization_of(config)
    except ValueError as error:
        raise LoadError(
            f"{path}: {error}; give a checkpoint in FP8 by compressed-tensors, bfloat16, float16"
            " or float32"
        ) from None
    if quantized is not None and not decoder.supports(config):
        raise LoadError(
            f"{path}: field {quantization.FIELD}: quantized weights are not supported"
            f" for model_type {config.model_type}, only for {', '.join(decoder.FAMILY)}"
        )
    if config.model_type == "whisper":
        return config
    text = text_config(config)
    for field in NEEDED:
        if not isinstance(getattr(text, field, None), int):
            raise LoadError(f"{path}: field {field} is missing; not a decoder-only model's config")
    if (kind := rope.rope_type(text)) in LENGTH_DEPENDENT:
        raise LoadError(f"{path}: field rope_parameters.rope_type: {kind} is not supported")
    return config


def quantization_of(config: Any) -> Quantization | None:
    """Return the quantization of a config's weights; None if they are not quantized.

    Raises ValueError with a field that is not supported.
    """
    value = getattr(config, quantization.FIELD, None)
    return quantization.read(value, bool(getattr(config, "tie_word_embeddings", False)))


def text_config(config: Any) -> Any:
    """Return the config of the decoder, which is a part of a multimodal config."""
    return config.text_config if config.model_type == "llava" else config


def positions(config: Any) -> int:
    """Return the maximum context length of the decoder, in tokens."""
    if config.model_type == "whisper":
        return int(config.max_target_positions)
    return int(text_config(config).max_position_embeddings)


def choose_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype for ``name`` on ``device``.

    ``auto`` is float32 on a CPU. On CUDA it is bfloat16, unless the config says float32. A float16
    checkpoint then loses digits; :func:`fill` logs a warning.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise LoadError(f"dtype {name!r}: expected auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    return torch.float32 if config.dtype == torch.float32 else torch.bfloat16


def build(folder: Path, config: Any, dtype: torch.dtype, shard: Shard = WHOLE) -> OwnModel | None:
    """Return this engine's model, or one rank's shard, with its tensors on the meta device.

    None if only transformers has the model. ``folder`` is for messages. Raises :class:`LoadError`.
    """
    try:
        if shard != WHOLE and not decoder.supports(config):
            raise ValueError(
                f"{FLAG} {shard.size}: field model_type: {config.model_type} is supported on"
                f" one rank only; text models of {', '.join(decoder.FAMILY)} on several"
            )
        if config.model_type == "whisper":
            from plimsoll_engine.models.whisper import WhisperModel

            return WhisperModel(config, dtype)
        if not decoder.supports(text_config(config)):
            if config.model_type == "llava":
                raise ValueError("field text_config: only Llama, Mistral and Qwen are known")
            return None
        if config.model_type == "llava":
            from plimsoll_engine.models.llava import LlavaModel

            return LlavaModel(config, dtype)
        return Decoder(config, dtype, shard, quantization_of(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{folder / 'config.json'}: {error}") from None


def bind(model: OwnModel, tensors: dict[str, torch.Tensor]) -> None:
    """Make ``model`` use ``tensors``, without a copy.

    Raises ValueError with a name that does not fit ``model.parameters_by_name()``.
    """
    model.bind(tensors)


def fill(model: OwnModel, folder: Path) -> None:
    """Copy the checkpoint's tensors from the mapped files into the model's tensors.

    Raises :class:`LoadError` for tensors that are missing, unknown or of another shape.
    """
    targets = {
        source: (target, model.parts[name])
        for name, tensor in model.parameters_by_name().items()
        for (source, rows), target in zip(
            model.parts[name].sources,
            torch.split(tensor, [rows for _, rows in model.parts[name].sources]),
            strict=True,
        )
    }
    missing, unexpected, mismatched = set(targets), [], []
    rounded: Counter[str] = Counter()
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                ours = model.canonical(name)
                if ours not in targets:
                    if ours not in model.ignored and not name.endswith(NOT_READ):
                        unexpected.append(f"{name} in {path.name}")
                    continue
                missing.discard(ours)
                target, part = targets[ours]
                found = file.get_slice(name)
                expected = part.source_shape(tuple(target.shape))
                where = f"{name} in {path.name}"
                if why := mismatch(
                    where, found, expected, EIGHT_BITS if part.dtype == FP8 else FLOATS
                ):
                    mismatched.append(why)
                    continue
                if loses_digits(found.get_dtype(), target.dtype):
                    rounded[found.get_dtype()] += 1
                if part.split is None or part.shard == WHOLE:
                    target.copy_(file.get_tensor(name))
                else:
                    target.copy_(found[part.source_slices(tuple(target.shape))])
                if ours.endswith(SCALE) and not bool((target.isfinite() & (target >= 0)).all()):
                    mismatched.append(f"{where} has a scale that is negative or not finite")
    places = {model.canonical(name): file for name, file in files_by_tensor(folder).items()}
    raise_for_tensors(
        folder,
        missing=[f"{n} (by {INDEX} in {places[n]})" if n in places else n for n in missing],
        mismatched=mismatched,
        unexpected=unexpected,
    )
    warn_of_rounding(folder, rounded)


def load_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> Model:
    """Return the model, or one rank's shard, loaded from the checkpoint to ``device``."""
    model = build(folder, config, dtype, shard)
    if model is None:
        from plimsoll_engine.models import transformers_loader

        return transformers_loader.load(folder, config, dtype, device)
    tensors = model.parameters_by_name()
    bind(model, {name: torch.empty_like(t, device=device) for name, t in tensors.items()})
    try:
        fill(model, folder)
    except BaseException:
        model.close()
        raise
    return model
