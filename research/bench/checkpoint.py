"""Checkpoints of real shapes with random weights, for benchmarks on machines without a network.

    python -m bench.checkpoint --shape llama-8b OUT

The tensors have the names, shapes and type (bfloat16) of the real model's, drawn from N(0, 0.02²),
so that loading, memory and speed are those of the real model; the text is noise. The tokenizer has
one word for each token of the vocabulary: every token that is sampled is a piece of text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.shapes import SIZES

SHARD_BYTES = 4 << 30
STANDARD_DEVIATION = 0.02

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1_000_000.0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500_000.0,
        **SIZES["8b"],
    },
    "qwen3-0.6b": QWEN3 | SIZES["06b"],
    "qwen3-32b": QWEN3 | SIZES["32b"],
    "qwen3-30b-a3b-quarter": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "rope_theta": 1_000_000.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
        **SIZES["30b-a3b-quarter"],
    },
    "trial": QWEN3 | SIZES["tiny"] | {"rope_theta": 10_000.0},
    # Small enough for a test on a CPU.
    "small": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the checkpoint of ``config``, by name."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    inner = config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            own |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        if experts := config.get("num_experts", 0):
            own = {name: size for name, size in own.items() if not name.startswith("mlp.")}
            own |= expert_tensors(experts, hidden, config["moe_intermediate_size"])
        found |= {f"model.layers.{layer}.{name}.weight": size for name, size in own.items()}
    return found


def expert_tensors(experts: int, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's router and experts."""
    found: dict[str, tuple[int, ...]] = {"mlp.gate": (experts, hidden)}
    for expert in range(experts):
        own = f"mlp.experts.{expert}."
        found |= {own + name: (inner, hidden) for name in ("gate_proj", "up_proj")}
        found[own + "down_proj"] = (hidden, inner)
    return found


def _draw(shape: tuple[int, ...], device: str) -> torch.Tensor:
    if len(shape) == 1:  # a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return drawn.normal_(std=STANDARD_DEVIATION).cpu()


def write_weights(folder: Path, config: dict[str, Any], device: str) -> int:
    """The shards and their index; the bytes of all tensors."""
    shards: list[list[str]] = [[]]
    sizes = [0]
    shapes = tensors(config)
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if shards[-1] and sizes[-1] + size > SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        drawn = {name: _draw(shapes[name], device) for name in names}
        save_file(drawn, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # else vLLM takes the model's own
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write(folder: Path, shape: str, device: str) -> int:
    """A whole checkpoint in ``folder``, which is made anew; the bytes of its weights."""
    config = SHAPES[shape] | {
        "dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "bos_token_id": 0,
        "eos_token_id": 1, "attention_dropout": 0.0,
    }  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(folder, config["vocab_size"])
    torch.manual_seed(0)
    return write_weights(folder, config, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    print(write(flags.out, flags.shape, flags.device))


if __name__ == "__main__":
    main()
