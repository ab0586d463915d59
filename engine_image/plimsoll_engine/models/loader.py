"""A model from a local folder, by transformers, with our attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.models import paged_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoadError(Exception):
    """The checkpoint cannot be served; the message names the file, tensor or field."""


def choose_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu`` or ``cuda`` means here."""
    if name not in ("auto", "cpu", "cuda"):
        raise LoadError(f"device {name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError("device cuda: no CUDA device is visible; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load_config(folder: Path) -> Any:
    """The model's config, checked for what the paged attention needs."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise LoadError(f"model {folder}: no such folder")
    if not path.is_file():
        raise LoadError(f"{path}: no such file; a checkpoint folder needs config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LoadError(f"{path}: {error}") from None
    for field in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if not isinstance(getattr(config, field, None), int):
            raise LoadError(f"{path}: field {field} is missing; not a decoder-only model's config")
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise LoadError(f"{path}: field layer_types: sliding_attention is not supported")
    return config


def choose_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """``auto`` is the checkpoint's own type on CUDA and float32 on a CPU."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise LoadError(f"dtype {name!r}: expected auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    return torch.float32 if config.dtype == torch.float32 else torch.bfloat16


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on ``device``, in evaluation mode, every tensor from the checkpoint's files."""
    paged_attention.register()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not list(folder.glob("*.safetensors")):
        raise LoadError(f"{folder}: no *.safetensors file; weights in other formats are not read")
    _check_files(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=paged_attention.NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed in info, by name
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise LoadError(f"{folder}: {error}") from None
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        found = info.get(kind) or ()
        # A mismatched one is (name, shape in the file, shape in the model).
        if names := sorted(key if isinstance(key, str) else _shapes(*key) for key in found):
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise LoadError(f"{folder}: {len(names)} {kind.replace('_keys', ' tensors')}: {shown}")
    model.requires_grad_(False)
    return model.eval().to(device)


def _shapes(name: str, in_file: object, in_model: object) -> str:
    return f"{name} is {in_file} in the file and {in_model} in the model"


def _check_files(folder: Path) -> None:
    """Read each weights file's header, so that the error of a broken one names it."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path}: {error}") from None
