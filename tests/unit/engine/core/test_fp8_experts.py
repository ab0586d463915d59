"""FP8 checkpoints of a mixture of experts: what lies where, and how near the logits are.

Tests ``plimsoll_faults/models/write_fp8.py``, ``models/decoder_parts.py`` and
``kernels/experts_reference.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.errors import LoadError
from plimsoll_engine.kernels import quantized
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.models import loader, quantization
from plimsoll_faults.models.write_fp8 import write_fp8
from tests.fp8_logits import load, logits_of, off, round_linear_layers, rounded, texts
from tests.lora import SIZES
from tests.random_model import random_model

EXPERTS, WIDTH = 6, 32
SHORT = (15,) * 20
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe", "head_dim": 16, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH, "mlp_only_layers": [1], "norm_topk_prob": True,
}  # fmt: skip
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, with one layer that has no experts; each expert's tensors by their own names."""
    folder = tmp_path_factory.mktemp("exact")
    model = random_model(AutoConfig.for_model(**SIZES, **MIXTURE))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name:
                parameter.mul_(0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fp8(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    write_fp8(exact, folder)
    return folder


def test_each_expert_is_written_and_read_with_its_scales(exact: Path, fp8: Path) -> None:
    """By the names that compressed-tensors gives them, and nothing else is narrower than it was."""
    was, written = load_file(exact / "model.safetensors"), load_file(fp8 / "model.safetensors")
    kept = {name for name in was if written[name].dtype != FP8}
    assert {name.split(".", 3)[-1] for name in kept if ".layers.0." in name} == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    }  # fmt: skip
    tensors = load(fp8).get_parameters()
    first, second = (
        quantized.dequantize(tensors[f"layers.2.{name}"], tensors[f"layers.2.{name}_scale"])
        for name in ("gate_up", "down")
    )
    assert tensors["layers.2.gate_up"].dtype == tensors["layers.2.down"].dtype == FP8
    assert tensors["layers.2.router"].dtype == torch.float32
    for expert in range(EXPERTS):
        found = [*first.chunk(EXPERTS)[expert].chunk(2), second.chunk(EXPERTS)[expert]]
        for name, tensor in zip(PROJECTIONS, found, strict=True):
            path = f"model.layers.2.mlp.experts.{expert}.{name}"
            values, scales = written[f"{path}.weight"], written[f"{path}.weight_scale"]
            assert scales.shape == (len(values), 1)
            assert torch.equal(tensor, quantized.dequantize(values, scales))
            assert off(tensor, was[f"{path}.weight"]) < 0.04


def test_scales_may_have_the_type_of_the_other_tensors(fp8: Path, tmp_path: Path) -> None:
    """LLM Compressor writes them in the checkpoint's own type."""
    tensors = load_file(fp8 / "model.safetensors")
    narrow = {n: t.bfloat16() if n.endswith("_scale") else t for n, t in tensors.items()}
    save_file(narrow, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((fp8 / "config.json").read_text())
    found, wanted = (load(folder).get_parameters() for folder in (tmp_path, fp8))
    scales = found["layers.0.down_scale"]
    assert scales.dtype == torch.float32
    assert torch.equal(scales, wanted["layers.0.down_scale"].bfloat16().float())


def test_some_experts_alone_cannot_be_ignored(fp8: Path, tmp_path: Path) -> None:
    config = json.loads((fp8 / "config.json").read_text())
    config[quantization.CONFIG_FIELD]["ignore"].append(r"re:.*experts\.3\..*")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        LoadError, match=r"ignore matches .*experts\.3\.gate_proj but not .*experts\.0\.gate_proj"
    ):
        loader.build_model(tmp_path, loader.load_config(tmp_path), torch.float32)


def test_a_missing_scale_of_one_expert_is_named(fp8: Path, tmp_path: Path) -> None:
    tensors = load_file(fp8 / "model.safetensors")
    name = "model.layers.0.mlp.experts.4.up_proj.weight_scale"
    tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((fp8 / "config.json").read_text())
    with pytest.raises(LoadError, match=rf"1 missing tensors: {re.escape(name)}"):
        load(tmp_path)


@torch.inference_mode()
def simulated(exact: Path) -> torch.Tensor:
    """The logits by transformers in float32, with both factors of each product rounded."""
    model = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    round_linear_layers(model)

    def mixed(
        module: Any, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        rows = []
        for row, experts, weights in zip(rounded(x), chosen.tolist(), shares, strict=True):
            result = torch.zeros_like(row)
            for expert, weight in zip(experts, weights, strict=True):
                gate_up = linear(row, rounded(module.gate_up_proj[expert]))
                gate, up = gate_up.chunk(2)
                inner = rounded((silu(gate) * up)[None])
                result += weight * linear(inner, rounded(module.down_proj[expert]))[0]
            rows.append(result)
        return torch.stack(rows)

    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.forward = lambda *a, of=module: mixed(of, *a)
    return torch.cat([model(text[None], use_cache=False).logits[0] for text in texts(SHORT)])


def test_logits_are_those_of_the_roundings(
    exact: Path, fp8: Path, tmp_path: Path, helpers: Any, record_property: Any
) -> None:
    """Where two experts' scores are close, a rounding before them chooses the other one, in
    bfloat16 as well, and the row's logits are then others. So what is lost beside bfloat16 is
    compared in the middle row, and some rows of random weights have another best token.

    Processors sum in other orders. Where a sum is so close to the middle between two values of e4m3
    that this decides, all later rows of its text are others, so the texts are short."""
    was = load_file(exact / "model.safetensors")
    narrow = tmp_path / "bfloat16"
    narrow.mkdir()
    save_file(
        {n: t.bfloat16() for n, t in was.items()}, narrow / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    (narrow / "config.json").write_text((exact / "config.json").read_text())
    found, plain = logits_of(fp8, helpers, SHORT), logits_of(exact, helpers, SHORT)
    meant = simulated(exact)

    def rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        relative: torch.Tensor = (a - b).norm(dim=1) / b.norm(dim=1)
        return relative

    ours, bfloat16 = rows(found, plain), rows(logits_of(narrow, helpers, SHORT), plain)
    agreement = float((found.argmax(-1) == plain.argmax(-1)).float().mean())
    same = float((rows(found, meant) < 0.01).float().mean())
    for name, value in {
        "median": float(ours.median()), "median_of_bfloat16": float(bfloat16.median()),
        "top1_agreement": agreement, "rows_of_the_meaning": same,
    }.items():  # fmt: skip
        record_property(name, value)
        print(f"{name} {value:.4f}")
    assert same > 0.9
    assert float(rows(found, meant).median()) < 1e-3
    assert float(bfloat16.median()) < float(ours.median()) < 16 * 2**0.5 * float(bfloat16.median())
    assert agreement > 0.5
