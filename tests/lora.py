"""Small random checkpoints, LoRA adapters in PEFT's format, and checkpoints with one merged in."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from leaklab.recording import adapters
from plimsoll_faults.models import tiny

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


def write_model(folder: Path, name: str) -> Path:
    """A checkpoint of :data:`MODELS` whose texts are no loops."""
    generator = torch.Generator().manual_seed(8)
    config = AutoConfig.for_model(**SIZES | MODELS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            if parameter.dim() == 2:
                gain = 0.1 if "embed" in tensor else 2.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def write_adapter(
    folder: Path, base: Path, *, rank: int = 4, seed: int = 1, gain: float = 1.0,
    modules: tuple[str, ...] = ALL, **fields: Any,
) -> Path:  # fmt: skip
    """A random adapter of ``base``; ``fields`` go into its config. A ``gain`` far below 1 leaves
    the model's best tokens what they are."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in modules:
            out, columns = weight.shape
            a = torch.randn(rank, columns, generator=generator) / columns**0.5
            b = gain * torch.randn(out, rank, generator=generator) / rank**0.5
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    about = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules)}
    adapters.save(folder, tensors, **about | fields)
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """``base`` with W + scale * B @ A in the place of each W."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    weights = load_file(base / "model.safetensors")
    halves = load_file(adapter / "adapter_model.safetensors")
    for name, b in halves.items():
        if name.endswith(".lora_B.weight"):
            a = halves[name.replace(".lora_B.", ".lora_A.")]
            path = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            weights[f"{path}.weight"] += scale * b @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tiny_adapter(folder: Path, layer: int) -> Path:
    """An adapter of the tiny checkpoint that has one ``layer`` subtract what it looked at, not add
    it: the best token stays far ahead of the second."""
    head = layer % tiny.NUM_HEADS // (tiny.NUM_HEADS // tiny.NUM_KV_HEADS)
    sines = range(tiny.NUM_FREQUENCIES, tiny.NUM_PHASES)
    a = torch.zeros(len(sines), tiny.HIDDEN_SIZE)
    b = torch.zeros(tiny.NUM_KV_HEADS * tiny.HEAD_DIM, len(sines))
    for place, sine in enumerate(sines):
        a[place, tiny.get_code_slice(layer + 1).start + sine] = 1.0
        b[head * tiny.HEAD_DIM + sine, place] = -1.0
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "r": len(sines), "lora_alpha": 2 * len(sines), "bias": "none",
        "target_modules": ["v_proj"], "layers_to_transform": [layer],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
