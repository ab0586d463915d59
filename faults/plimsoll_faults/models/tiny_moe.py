"""A tiny Qwen3-MoE checkpoint whose next token is always unambiguous.

``python -m plimsoll_faults.models.tiny_moe OUT`` writes it. It follows the rule of
:mod:`plimsoll_faults.models.tiny`, and every layer i with experts adds one more number (mod M):

    GROUP_SHIFTS[group_i(t[-1])]

A group has two experts. The first adds the angles and rotates the result by the group's shift; the
second subtracts the old state. The router scores both equally, by the angle of one of the token's
codes. Each therefore has half of the weight, and computes twice its part. A wrong expert, a wrong
weight or a missing expert changes the text.

The second layer is in ``mlp_only_layers``: it has an MLP and no shift.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import torch

from plimsoll_faults.models import tiny

NUM_GROUPS = 3
NUM_EXPERTS = 2 * NUM_GROUPS
GROUP_SHIFTS = (5, 17, 40)
# Half of an MLP.
EXPERT_INTERMEDIATE_SIZE = 64
# These layers have an MLP instead of experts.
DENSE_LAYERS = (1,)
# Rotates the groups' directions, so that no code of a token lies between two of them.
GROUP_ROTATION_RAD = 0.37


def make_router_weight(layer: int) -> torch.Tensor:
    """Return a router weight [NUM_EXPERTS, HIDDEN_SIZE] that chooses a group by a code."""
    weight = torch.zeros(NUM_EXPERTS, tiny.HIDDEN_SIZE)
    code = tiny.get_code_slice(layer + 1).start
    for expert in range(NUM_EXPERTS):
        angle = GROUP_ROTATION_RAD + 2 * math.pi * (expert // 2) / NUM_GROUPS
        weight[expert, code] = math.cos(angle)
        weight[expert, code + tiny.NUM_FREQUENCIES] = math.sin(angle)
    return weight


def make_expert_weights(
    mlp: dict[str, torch.Tensor], frequencies: list[int], modulus: int
) -> dict[str, torch.Tensor]:
    """Return the expert tensors of a layer, made from its MLP tensors."""
    gate, up, down = (mlp[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    adding, taking = (
        slice(0, EXPERT_INTERMEDIATE_SIZE),
        slice(EXPERT_INTERMEDIATE_SIZE, 2 * EXPERT_INTERMEDIATE_SIZE),
    )
    tensors = {}
    for expert in range(NUM_EXPERTS):
        own = taking if expert % 2 else adding
        result = 2.0 * down[:, own]
        if own is adding:
            result = add_shift(result, GROUP_SHIFTS[expert // 2], frequencies, modulus)
        for name, weight in (("gate", gate[own]), ("up", up[own]), ("down", result)):
            tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = weight.clone()
    return tensors


def add_shift(
    weight: torch.Tensor, shift: int, frequencies: list[int], modulus: int
) -> torch.Tensor:
    """Return a copy of ``weight`` [HIDDEN_SIZE, columns] that also adds ``shift`` to its output."""
    angles = torch.tensor(frequencies).double() * shift * (2 * math.pi / modulus)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    real, imaginary = slice(0, tiny.NUM_FREQUENCIES), slice(tiny.NUM_FREQUENCIES, tiny.NUM_PHASES)
    shifted = weight.clone()
    shifted[real] = cos * weight[real] - sin * weight[imaginary]
    shifted[imaginary] = sin * weight[real] + cos * weight[imaginary]
    return shifted


def add_experts(tensors: dict[str, torch.Tensor], modulus: int) -> dict[str, torch.Tensor]:
    """Return ``tensors`` of the tiny checkpoint, with experts in all but the dense layers."""
    frequencies = tiny.choose_frequencies(random.Random(tiny.SEED), modulus)
    changed = dict(tensors)
    for layer in range(len(tiny.ATTENTION_LAGS)):
        if layer in DENSE_LAYERS:
            continue
        prefix = f"model.layers.{layer}."
        mlp = {
            name: changed.pop(prefix + name)
            for name in [f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")]
        }
        own = make_expert_weights(mlp, frequencies, modulus)
        own["mlp.gate.weight"] = make_router_weight(layer)
        changed |= {prefix + name: tensor for name, tensor in own.items()}
    return changed


CONFIG_FIELDS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_INTERMEDIATE_SIZE,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": list(DENSE_LAYERS),
}


def write_checkpoint(folder: Path) -> None:
    """Write the whole checkpoint into ``folder``."""
    tiny.write_checkpoint(folder, CONFIG_FIELDS, add_experts)


def main() -> None:
    """Write the tiny Qwen3-MoE checkpoint into a folder."""
    parser = argparse.ArgumentParser(description="Write the tiny Qwen3-MoE checkpoint.")
    parser.add_argument("out", type=Path, help="folder to write the checkpoint to")
    write_checkpoint(parser.parse_args().out)


if __name__ == "__main__":
    main()
