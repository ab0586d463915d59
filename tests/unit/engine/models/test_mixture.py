"""What configs say of experts, which of them are refused, and what adapters may change.

Tests ``models/mixture.py``, ``models/decoder_parts.py`` and ``models/lora.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plimsoll_engine.errors import LoadError
from plimsoll_engine.models import loader, lora
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.decoder_parts import DecoderSpec

SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}  # fmt: skip


def config(**fields: Any) -> Any:
    return AutoConfig.for_model(**(SIZES | fields))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2, 4]}, [5]),
        ({"mlp_only_layers": [0, 5, 17]}, [1, 2, 3, 4]),
        ({"decoder_sparse_step": 7}, []),
        ({"num_experts": 0}, []),
    ],
)
def test_layers_with_experts_are_those_of_transformers(
    fields: dict[str, Any], layers: list[int]
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeDecoderLayer,
        Qwen3MoeSparseMoeBlock,
    )

    asked = config(**fields)
    with torch.device("meta"):
        theirs = [
            layer
            for layer in range(6)
            if isinstance(Qwen3MoeDecoderLayer(asked, layer).mlp, Qwen3MoeSparseMoeBlock)
        ]
    assert theirs == layers
    mixture = DecoderSpec.from_config(asked).mixture
    assert (sorted(mixture.layers) if mixture else []) == layers
    parts = Decoder(asked, torch.float32).parts
    assert sorted(int(name.split(".")[1]) for name in parts if name.endswith("router")) == layers
    for layer in range(6):
        columns = parts[f"layers.{layer}.down"].shape[1]
        assert columns == (12 if layer in layers else 48)


def test_a_model_without_experts_has_no_mixture() -> None:
    assert DecoderSpec.from_config(config(model_type="qwen3")).mixture is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok must be at most num_experts .5., got 6"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be from 1 to 64, got 0"),
        ({"num_experts": 1025}, "num_experts must be from 0 to 1024, got 1025"),
        ({"num_experts": -1}, "num_experts must be from 0 to 1024, got -1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1, got 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, got 0"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=rf"m/config\.json: field {message}"):
        loader.build_model(Path("m"), config(**fields), torch.float32)


@pytest.mark.parametrize(
    ("field", "value"), [("num_experts", "many"), ("mlp_only_layers", ["all"]), ("hidden_size", [])]
)
def test_a_field_of_another_type_is_named(field: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {field: value}))
    with pytest.raises(LoadError, match=rf"config\.json: .*{field}"):
        loader.load_config(tmp_path)


def test_adapters_change_what_all_rows_go_through() -> None:
    parts = Decoder(config(mlp_only_layers=[3]), torch.float32).parts
    paths = set(lora.find_targets(parts))
    attention = {
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(6) for name in "qkvo"
    }
    dense = {f"model.layers.3.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert paths == attention | dense
