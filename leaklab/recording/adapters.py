"""Random LoRA adapters in PEFT's format for a checkpoint of which there is only a description."""

from __future__ import annotations

import json
from pathlib import Path

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
        about = {
            "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none",
            "target_modules": list(rows), "modules_to_save": None, "use_dora": False,
        }  # fmt: skip
        (one / "adapter_config.json").write_text(json.dumps(about))
        save_file(tensors, one / "adapter_model.safetensors", metadata={"format": "pt"})
        made.append(one)
    return made
