"""Random LoRA adapters in PEFT's format for a checkpoint of which there is only a description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 8


def write(folder: Path, checkpoint: Path, count: int) -> list[Path]:
    """Write ``count`` adapters of a Qwen3's or Llama's attention; return their folders."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    rows = {
        "q_proj": config["num_attention_heads"] * width,
        "v_proj": config["num_key_value_heads"] * width,
    }
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, size in rows.items():
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
                tensors[f"{path}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
        one = folder / f"adapter-{number}"
        one.mkdir(parents=True, exist_ok=True)
        save(one, tensors, r=RANK, lora_alpha=RANK, target_modules=list(rows))
        made.append(one)
    return made


def save(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> None:
    """Write an adapter into a folder that exists; ``fields`` go into its config."""
    config = {"peft_type": "LORA", "bias": "none", "modules_to_save": None, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
