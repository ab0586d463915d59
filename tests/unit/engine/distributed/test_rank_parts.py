"""The ranks' parts of a model are the whole together; what cannot be shared out says so.

Tests ``models/decoder_parts.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.distributed.member import Member
from plimsoll_engine.errors import LoadError, SettingsError
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from plimsoll_faults.models.write_fp8 import write_fp8

CPU = torch.device("cpu")
SCALES = ("out_scale", "down_scale")
"""Of sums over the ranks: each rank's part has all rows."""
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-moe": {
        "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "mlp_only_layers": [1],
    },
}  # fmt: skip


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = AutoConfig.for_model(**SIZES, **MODELS[request.param])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, shard: Shard) -> Decoder:
    model = loader.load_model(folder, loader.load_config(folder), torch.float32, CPU, shard)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
def test_the_parts_of_all_ranks_are_the_whole(checkpoint: Path, fp8: bool, size: int) -> None:
    if fp8:
        write_fp8(checkpoint, checkpoint / "fp8")
        checkpoint /= "fp8"
    whole = load(checkpoint, Shard())
    ranks = [load(checkpoint, Shard(rank, size)) for rank in range(size)]
    for name, tensor in whole.get_parameters().items():
        theirs = [rank.get_parameters()[name] for rank in ranks]
        part = ranks[0].parts[name]
        if part.split is None:
            assert all(torch.equal(one, tensor) for one in theirs), name
            assert name.endswith(("norm", "embed", "out_bias", "down_bias", "router", *SCALES)), (
                name
            )
            continue
        # Source by source: query, key and value are one matrix here, each split by itself.
        counts = [rows for _, rows in part.sources]
        found = [
            torch.cat(pieces, dim=part.split)
            for pieces in zip(*(torch.split(one, counts) for one in theirs), strict=True)
        ]
        assert torch.equal(torch.cat(found).float(), tensor.float()), name
    assert {rank.kv for rank in ranks} == {(2, 4 // size, 8)}
    split = sum(t.nbytes for t in ranks[0].get_parameters().values())
    assert split < sum(t.nbytes for t in whole.get_parameters().values())


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_bias_of_a_sum_is_added_by_one_rank(checkpoint: Path) -> None:
    biases = [load(checkpoint, Shard(rank, 2))._layers[0].out_bias for rank in range(2)]
    assert biases[0] is not None
    assert biases[1] is None


@pytest.mark.parametrize(
    ("field", "value", "size"),
    [
        ("num_attention_heads", 4, 8),
        ("num_key_value_heads", 4, 8),
        ("intermediate_size", 49, 2),
        ("moe_intermediate_size", 50, 4),
        ("vocab_size", 97, 2),
    ],
)
def test_a_field_that_cannot_be_divided_is_named(field: str, value: int, size: int) -> None:
    kind = "qwen3_moe" if field.startswith("moe") else "llama"
    config = AutoConfig.for_model(**{**SIZES, field: value}, model_type=kind)
    with pytest.raises(
        LoadError, match=rf"config\.json: field {field} is {value}, .*parallel-size"
    ):
        loader.build_model(Path("m"), config, torch.float32, Shard(0, size))


@pytest.mark.parametrize("kind", ["whisper", "llava", "gpt_neox"])
def test_models_of_one_rank_are_refused(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    with pytest.raises(
        LoadError,
        match=rf"models of type {kind} support only one rank: use --tensor-parallel-size 1 ",
    ):
        loader.build_model(Path("m"), config, torch.float32, Shard(1, 2))


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loader.choose_device("auto", Shard(1, 2)) == torch.device("cuda", 1)
    with pytest.raises(
        LoadError, match=r"--tensor-parallel-size is 4, but only 2 CUDA devices are visible"
    ):
        loader.choose_device("cuda", Shard(0, 4))


def test_settings_that_several_ranks_cannot_have() -> None:
    config = WorkerConfig("m", "/r", "s", kv_offload_bytes=1 << 20, tensor_parallel_size=2)
    with pytest.raises(SettingsError, match="is 2, but 1 ranks were started"):
        Member(None).check_settings(config)
