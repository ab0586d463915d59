"""The published configs of the models that the engine is measured on, with random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from plimsoll_engine.models.decoder import Decoder

SIZES: dict[str, dict[str, Any]] = {
    "06b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    # 65 GB of weights, which leave one GPU of 80 GB no room to serve.
    "32b": {
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    # For trying a benchmark out on a CPU; its prompts have ids below 10,000.
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 10_000,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
    # 12 of the 48 layers: a benchmark's check has all weights in float32, too.
    "30b-a3b-quarter": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
}  # fmt: skip
SIZES["tiny-moe"] = SIZES["tiny"] | {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
"""Of Qwen3-0.6B, Llama-3.1-8B, Qwen3-32B and Qwen3-30B-A3B, and of two tiny models."""
LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def config_of(shape: str) -> Any:
    """The config of a model in :data:`SIZES`."""
    sizes = SIZES[shape]
    if shape == "8b":
        return LlamaConfig(**sizes, rope_parameters=LLAMA_ROPE)
    kind = Qwen3MoeConfig if "num_experts" in sizes else Qwen3Config
    return kind(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})


SHAPES = {shape: partial(config_of, shape) for shape in SIZES}


def random_decoder(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
    """The model with normal weights of the config's own deviation, made on ``device``."""
    model = Decoder(config, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, meta in model.get_parameters().items():
        tensor = torch.empty_like(meta, device=device)
        if name.endswith("norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, config.initializer_range, generator=generator)
        tensors[name] = tensor
    model.bind(tensors)
    return model
