"""A model from a local folder: our own decoder where it knows the architecture, else transformers'.

The weight server takes the steps one by one: :func:`build` on the meta device, :func:`bind` to
tensors of its own, :func:`fill` them from the files.
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
    complain,
    loses_digits,
    opened,
    placed,
    unfit,
    warn_of_rounding,
    weight_files,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NOT_READ = (".rotary_emb.inv_freq", ".embeddings.position_ids")
"""Names' ends in old checkpoints that hold what the config says."""
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotations that change with the longest sequence of a batch: no cache of keys can follow."""


class OwnModel(Model, Protocol):
    """A model of ours, whose tensors are bound and filled from outside.

    ``parts`` says for each tensor by its name which of a checkpoint's tensors lie in it; their
    names there are first made ``canonical``, and those in ``ignored`` are not read.
    """

    parts: dict[str, Part]

    @property
    def ignored(self) -> frozenset[str]:
        """Names in checkpoints that the model has no use for."""

    def canonical(self, name: str) -> str:
        """Return the name in ``parts`` of a tensor that checkpoints call ``name``."""

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the loaded tensors, in shape and dtype of ``parts``, as the model's weights."""


OTHERS = {"llava": "llava", "whisper": "whisper"}
"""Our models beside the decoder, by model type: their modules import model code of transformers,
which takes seconds, so nobody else imports them."""


def import_code(folder: Path) -> None:
    """Import all that the model in ``folder`` needs, for a process that others are forked from.

    Nothing where its config cannot be read: whoever loads it says why.
    """
    with contextlib.suppress(LoadError):
        config = load_config(folder)
        if config.model_type in OTHERS:
            importlib.import_module(f"plimsoll_engine.models.{OTHERS[config.model_type]}")
        elif not decoder.supports(text_config(config)):
            from plimsoll_engine.models import transformers_loader

            transformers_loader.import_code(config)


def choose_device(name: str, shard: Shard = WHOLE) -> torch.device:
    """Return the device that ``auto``, ``cpu`` or ``cuda`` means here.

    Rank r of several has device r.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise LoadError(f"device {name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError("device cuda: no CUDA device is visible; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if shard.size > (count := torch.cuda.device_count()):
        raise LoadError(
            f"{FLAG} {shard.size}: {count} CUDA devices are visible; lower it to {count} at most"
        )
    return torch.device("cuda", torch.cuda.current_device() if shard == WHOLE else shard.rank)


def load_config(folder: Path) -> Any:
    """Return the model's config, checked for what the paged attention needs."""
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
            f"{path}: field {quantization.FIELD}: quantized weights of model_type"
            f" {config.model_type} are not supported, only of {', '.join(decoder.FAMILY)}"
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
    """Return how a config's weights are quantized, None where they are not.

    ValueError names a field that is not supported.
    """
    value = getattr(config, quantization.FIELD, None)
    return quantization.read(value, bool(getattr(config, "tie_word_embeddings", False)))


def text_config(config: Any) -> Any:
    """Return what describes the decoder: a part of the config where the model sees as well."""
    return config.text_config if config.model_type == "llava" else config


def positions(config: Any) -> int:
    """How many tokens of context the decoder was made for."""
    if config.model_type == "whisper":
        return int(config.max_target_positions)
    return int(text_config(config).max_position_embeddings)


def choose_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the type that ``name`` means on ``device``.

    ``auto`` is float32 on a CPU, and on CUDA bfloat16 unless the config says float32. A checkpoint
    in float16 loses digits by that, of which :func:`fill` warns.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise LoadError(f"dtype {name!r}: expected auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    return torch.float32 if config.dtype == torch.float32 else torch.bfloat16


def build(folder: Path, config: Any, dtype: torch.dtype, shard: Shard = WHOLE) -> OwnModel | None:
    """Return our model, or one rank's part of it, with its tensors on the meta device.

    None where only transformers has it.

    ``folder`` is for messages. Raises :class:`LoadError`.
    """
    try:
        if shard != WHOLE and not decoder.supports(config):
            raise ValueError(
                f"{FLAG} {shard.size}: field model_type: {config.model_type} is computed by one"
                f" rank alone; only text models of {', '.join(decoder.FAMILY)} by several"
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
    """Make ``model`` compute with ``tensors``, which keep their memory.

    ValueError names one that does not fit ``model.parameters_by_name()``.
    """
    model.bind(tensors)


def fill(model: OwnModel, folder: Path) -> None:
    """Copy the checkpoint's tensors from their mapped files straight into the model's own.

    Raises :class:`LoadError` for tensors that are missing, of another shape or of no model.
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
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                ours = model.canonical(name)
                if ours not in targets:
                    if ours not in model.ignored and not name.endswith(NOT_READ):
                        unexpected.append(f"{name} in {path.name}")
                    continue
                missing.discard(ours)
                target, part = targets[ours]
                found = file.get_slice(name)
                expected = part.whole(tuple(target.shape))
                where = f"{name} in {path.name}"
                if why := unfit(
                    where, found, expected, EIGHT_BITS if part.dtype == FP8 else FLOATS
                ):
                    mismatched.append(why)
                    continue
                if loses_digits(found.get_dtype(), target.dtype):
                    rounded[found.get_dtype()] += 1
                if part.split is None or part.shard == WHOLE:
                    target.copy_(file.get_tensor(name))
                else:
                    target.copy_(found[part.cut(tuple(target.shape))])
                if ours.endswith(SCALE) and not bool((target.isfinite() & (target >= 0)).all()):
                    mismatched.append(f"{where} has a scale that is negative or not finite")
    places = {model.canonical(name): file for name, file in placed(folder).items()}
    complain(
        folder,
        missing=[f"{n} (by {INDEX} in {places[n]})" if n in places else n for n in missing],
        mismatched=mismatched,
        unexpected=unexpected,
    )
    warn_of_rounding(folder, rounded)


def load_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> Model:
    """Return the model, or one rank's part, on ``device``, all from the checkpoint's files."""
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
