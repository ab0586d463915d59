"""A tiny Qwen3 checkpoint, created in a second, whose next token is always unambiguous.

``python -m plimsoll_faults.models.tiny OUT`` writes config, weights (float32, about 1 MB),
tokenizer and generation config. The weights are not random; they implement the rule

    next = code_0(t[-1]) + code_1(t[-1 - LAGS[0]]) + ... + code_4(t[-1 - LAGS[3]])  (mod M)

Each ``code`` is a fixed random number for each token, and M is the number of tokens that represent
plain text. A number modulo M is represented by its phases at F frequencies.

One head of each layer looks back by a fixed distance. Its query and key differ by a rotation, so
the score depends only on the distance and has its maximum at the lag. The MLP of the layer adds the
two numbers: SwiGLU computes exact products, ``silu(x)y + silu(-x)(-y) = xy``, so it can add angles.

The output head scores token v with the sum of cos(phase difference), which has one high peak. The
best logit is far ahead of the second at every step. So tests of equal greedy text in float32 do not
fail because of ties. In bfloat16, rounding of seven consecutive products uses up this lead, so the
text differs. The text depends on 84 tokens of context, never contains EOS, and does not repeat in
loops.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from plimsoll_faults.models import tiny_text

NUM_FREQUENCIES = 8
NUM_PHASES = 2 * NUM_FREQUENCIES
ATTENTION_LAGS = (1, 6, 23, 83)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, NUM_PHASES
HIDDEN_SIZE, INTERMEDIATE_SIZE = 128, 128
ROPE_THETA = 10_000.0
MAX_POSITIONS = 8192
# The attended token then has more than .99 of the weight at every position.
QUERY_KEY_GAIN = 14.0
OUTPUT_HEAD_GAIN = 2.0
SEED = 20

TensorChange = Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]
"""Replaces the tensors by name; the number is that of the plain text tokens."""

STATE_SLICE = slice(0, NUM_PHASES)
ATTENDED_SLICE = slice(NUM_PHASES, 2 * NUM_PHASES)
# The hidden dimension that is always 1.
BIAS_INDEX = (len(ATTENTION_LAGS) + 2) * NUM_PHASES
LINEAR_GATE_INPUT = 8.0
SILU_OF_LINEAR_GATE_INPUT = LINEAR_GATE_INPUT / (1 + math.exp(-LINEAR_GATE_INPUT))


def get_code_slice(index: int) -> slice:
    """Return the dimensions that hold the code number ``index`` in an embedding."""
    if index == 0:
        return STATE_SLICE
    return slice((index + 1) * NUM_PHASES, (index + 2) * NUM_PHASES)


def compute_phases(residues: torch.Tensor, frequencies: list[int], modulus: int) -> torch.Tensor:
    """Return the phases of ``residues`` [n] as [n, NUM_PHASES]: cosines, then sines."""
    angles = residues.double().unsqueeze(-1) * torch.tensor(frequencies) * (2 * math.pi / modulus)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def choose_frequencies(rng: random.Random, modulus: int) -> list[int]:
    """Return the random draw of frequencies with the lowest second-best output score."""
    draws = [rng.sample(range(1, modulus // 2), NUM_FREQUENCIES) for _ in range(300)]
    distance = torch.arange(1, modulus, dtype=torch.float64).unsqueeze(-1) * 2 * math.pi / modulus

    def compute_second_best(draw: list[int]) -> float:
        return float((distance * torch.tensor(draw)).cos().sum(dim=-1).max())

    return min(draws, key=compute_second_best)


def make_attention_weights(layer: int) -> dict[str, torch.Tensor]:
    """Return the weights of a head that copies a code of an earlier token.

    The token is ``ATTENTION_LAGS[layer]`` tokens back.
    """
    head, lag = layer % NUM_HEADS, ATTENTION_LAGS[layer]
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    angles = lag * ROPE_THETA ** (-torch.arange(NUM_FREQUENCIES).double() / NUM_FREQUENCIES)
    query = torch.zeros(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE)
    key = torch.zeros(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE)
    value = torch.zeros(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE)
    out = torch.zeros(HIDDEN_SIZE, NUM_HEADS * HEAD_DIM)
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    kv_rows = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
    query[rows, BIAS_INDEX] = torch.cat([angles.cos(), -angles.sin()]).float()
    key[kv_rows, BIAS_INDEX] = torch.cat(
        [torch.ones(NUM_FREQUENCIES), torch.zeros(NUM_FREQUENCIES)]
    )
    value[kv_rows, get_code_slice(layer + 1)] = torch.eye(NUM_PHASES)
    out[ATTENDED_SLICE, rows] = torch.eye(NUM_PHASES)
    return {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": out,
        "self_attn.q_norm.weight": torch.full((HEAD_DIM,), QUERY_KEY_GAIN),
        "self_attn.k_norm.weight": torch.full((HEAD_DIM,), QUERY_KEY_GAIN),
    }


def make_mlp_weights() -> dict[str, torch.Tensor]:
    """Return MLP weights that add the attended number to the number in the state."""
    gate, up = (
        torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        torch.zeros(INTERMEDIATE_SIZE, HIDDEN_SIZE),
    )
    down = torch.zeros(HIDDEN_SIZE, INTERMEDIATE_SIZE)
    neuron = 0

    def add_product(left: int, right: int, target: int, sign: float) -> None:
        nonlocal neuron
        for mirror in (1.0, -1.0):
            gate[neuron, left], up[neuron, right] = mirror, mirror
            down[target, neuron] = sign
            neuron += 1

    for f in range(NUM_FREQUENCIES):
        cos, sin = f, NUM_FREQUENCIES + f
        other_cos, other_sin = NUM_PHASES + cos, NUM_PHASES + sin
        add_product(cos, other_cos, cos, 1.0)
        add_product(sin, other_sin, cos, -1.0)
        add_product(sin, other_cos, sin, 1.0)
        add_product(cos, other_sin, sin, 1.0)
    for dimension in range(2 * NUM_PHASES):  # remove the old state and the values that were read
        gate[neuron, BIAS_INDEX], up[neuron, dimension] = LINEAR_GATE_INPUT, 1.0
        down[dimension, neuron] = -1.0 / SILU_OF_LINEAR_GATE_INPUT
        neuron += 1
    return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}


def build_tensors(text_tokens: list[int], vocabulary_size: int) -> dict[str, torch.Tensor]:
    """Return all tensors by their names in a Qwen3 checkpoint."""
    rng = random.Random(SEED)
    modulus = len(text_tokens)
    frequencies = choose_frequencies(rng, modulus)
    embedding = torch.zeros(vocabulary_size, HIDDEN_SIZE)
    embedding[:, BIAS_INDEX] = 1.0
    for index in range(len(ATTENTION_LAGS) + 1):
        residues = torch.tensor([rng.randrange(modulus) for _ in range(vocabulary_size)])
        embedding[:, get_code_slice(index)] = compute_phases(residues, frequencies, modulus)
    head = torch.zeros(vocabulary_size, HIDDEN_SIZE)
    head[text_tokens, STATE_SLICE] = OUTPUT_HEAD_GAIN * compute_phases(
        torch.arange(modulus), frequencies, modulus
    )

    def make_norm_weight(phase_groups: int) -> torch.Tensor:
        # The squared norm of a phase group is NUM_FREQUENCIES, so RMSNorm divides by a constant.
        # This weight multiplies by the same constant.
        return torch.full(
            (HIDDEN_SIZE,), math.sqrt((phase_groups * NUM_FREQUENCIES + 1) / HIDDEN_SIZE)
        )

    groups = len(ATTENTION_LAGS) + 1
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": make_norm_weight(groups),
        "lm_head.weight": head,
    }
    for layer in range(len(ATTENTION_LAGS)):
        parts = make_attention_weights(layer) | make_mlp_weights()
        parts["input_layernorm.weight"] = make_norm_weight(groups)
        parts["post_attention_layernorm.weight"] = make_norm_weight(groups + 1)
        tensors |= {f"model.layers.{layer}.{name}": part for name, part in parts.items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_checkpoint(
    folder: Path,
    config_fields: Mapping[str, Any] | None = None,
    change_tensors: TensorChange | None = None,
) -> None:
    """Write the checkpoint into ``folder``, with changed config fields and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_text.train_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": len(ATTENTION_LAGS),
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id(tiny_text.BOS),
        "eos_token_id": tokenizer.token_to_id(tiny_text.EOS),
        "pad_token_id": tokenizer.token_to_id(tiny_text.BOS),
        **(config_fields or {}),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tiny_text.write_tokenizer(tokenizer, folder)
    text_tokens = tiny_text.list_plain_text_tokens(tokenizer)
    tensors = build_tensors(text_tokens, vocabulary)
    if change_tensors is not None:
        tensors = change_tensors(tensors, len(text_tokens))
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private; the engine may run as another user


def main() -> None:
    """Write the tiny Qwen3 checkpoint into a folder."""
    parser = argparse.ArgumentParser(description="Write the tiny Qwen3 checkpoint.")
    parser.add_argument("out", type=Path, help="folder in which to write the checkpoint")
    write_checkpoint(parser.parse_args().out)


if __name__ == "__main__":
    main()
