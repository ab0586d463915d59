"""The tiny checkpoint, and the errors of broken ones.

Tests ``models/loader.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.core import sizes
from plimsoll_engine.errors import LoadError, SettingsError
from plimsoll_engine.kernels.step_plan import KVShape
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_faults.models.tiny import write_checkpoint

CPU = torch.device("cpu")


def load(folder: Path) -> Any:
    return loader.load_model(folder, loader.load_config(folder), torch.float32, CPU)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


NORM, GATE = "model.norm.weight", "model.layers.2.mlp.gate_proj.weight"
BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (shutil.rmtree, "does not exist"),
    (lambda f: (f / "config.json").unlink(), r"config\.json does not exist"),
    (lambda f: (f / "config.json").write_text("{"), r"config\.json"),
    (lambda f: edit_config(f, model_type="nonsense"), r"config\.json.*nonsense"),
    (lambda f: (f / "model.safetensors").unlink(), r"contains no \*\.safetensors file"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\x10" * 99), r"model\.safetensors: "),
    (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), rf"1 missing tensors: {NORM}"),
    (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.ones(1))), "unexpected.*extra"),
    (lambda f: edit_tensors(f, lambda t: t.update({GATE: torch.ones(2, 2)})), GATE),
    (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: t[NORM].to(torch.int8)})),
        rf"{NORM} in model\.safetensors must have the dtype F32",
    ),
    (lambda f: edit_config(f, quantization_config={"quant_method": "fp8"}), "quantization_config"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_broken_checkpoint_is_named(
    damage: Callable[[Path], Any], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    damage(folder)
    with pytest.raises(LoadError, match=message):
        load(folder)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(folder: Path) -> None:
    """Spread the one file over two, with an index as transformers writes it."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    halves = {FIRST: names[:20], SECOND: names[20:]}
    for file, its in halves.items():
        save_file({name: tensors[name] for name in its}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, its in halves.items() for name in its}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_shard(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


INDEX = r"model\.safetensors\.index\.json"
BROKEN_SHARDS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / SECOND).unlink(), rf"{INDEX} lists {SECOND}, which does not exist"),
    (lambda f: (f / FIRST).write_bytes(b"torn"), FIRST),
    (lambda f: (f / "model.safetensors.index.json").write_text("{"), INDEX),
    (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'), INDEX),
    (
        lambda f: (f / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../a.safetensors"}}'
        ),
        INDEX,
    ),
    (
        lambda f: edit_shard(f, SECOND, lambda t: t.pop(NORM)),
        rf"1 missing tensors: {NORM} \(which {INDEX} places in {SECOND}\)",
    ),
    (
        lambda f: edit_shard(f, FIRST, lambda t: t.update(extra=torch.ones(1))),
        f"1 unexpected tensors: extra in {FIRST}",
    ),
    (
        lambda f: edit_shard(f, SECOND, lambda t: t.update({NORM: torch.ones(3)})),
        rf"{NORM} in {SECOND} has the shape \(3,\) in the file, but \(128,\) in the model",
    ),
    (
        lambda f: edit_shard(
            f, SECOND, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})
        ),
        rf"{NORM} in {SECOND} must have the dtype",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN_SHARDS)
def test_a_broken_shard_is_named(
    damage: Callable[[Path], Any], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    shard(folder)
    damage(folder)
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_shards_are_the_same_model(tiny_checkpoint: Path, tmp_path: Path, tiny_model: Any) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    shard(folder)
    found = load(folder).get_parameters()
    expected = tiny_model.get_parameters()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_tiny_checkpoint_is_the_same_every_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    again, first = (load_file(f / "model.safetensors") for f in (tmp_path, tiny_checkpoint))
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)


def test_the_best_token_is_never_in_doubt(tiny_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    texts = []
    for prompt in ("A", "Tell me about the weather in the harbour.", "Tell me about the ship."):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best, second = torch.stack(out.logits)[:, 0].topk(2).values.unbind(dim=-1)
        assert (best - second).min() > 1.0
        texts.append(tokenizer.decode(out.sequences[0, ids.shape[1] :].tolist()))
    assert len(set(texts)) == 3
    assert all(text.isascii() and len(set(text.split())) > 20 for text in texts)


def test_the_tiny_checkpoint_can_be_carried_far(tiny_checkpoint: Path) -> None:
    config = loader.load_config(tiny_checkpoint)
    assert config.max_position_embeddings >= 4096
    body = json.loads((tiny_checkpoint / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    assert "chat_template" in body
    for token in (body["eos_token"], body["bos_token"]):
        assert tokenizer.token_to_id(token) is not None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, got 0"),
        (
            {"max_model_len": 99_999},
            "--max-model-len must be at most 8192, the number of positions",
        ),
    ],
)
def test_a_size_that_cannot_be_is_named(
    asked: dict[str, int], message: str, tiny_checkpoint: Path
) -> None:
    config = WorkerConfig(str(tiny_checkpoint), "/x", "/x", **asked)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=message):
        sizes.resolve_sizes(config, KVShape(4, 2, 16), 8192, torch.float32, CPU)


def test_sizes_follow_from_the_model_and_the_pool(tiny_checkpoint: Path) -> None:
    from plimsoll_engine.models.transformers_model import get_kv_shape  # takes seconds

    model = loader.load_config(tiny_checkpoint)
    config = WorkerConfig(str(tiny_checkpoint), "/x", "/x", num_blocks=10, block_size=8)
    found = sizes.resolve_sizes(
        config, get_kv_shape(model), loader.get_max_context_length(model), torch.float32, CPU
    )
    assert (found.num_blocks, found.max_model_len) == (10, 80)
    assert get_kv_shape(model).compute_bytes_per_token(torch.float32) == 2 * 4 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("in_file", "dtype", "rounded"),
    [
        (torch.float16, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, True),
        (torch.float64, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.float32, False),
        (torch.bfloat16, torch.float32, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("own", [True, False], ids=["own", "transformers"])
def test_the_log_says_that_weights_are_rounded(
    in_file: torch.dtype,
    dtype: torch.dtype,
    rounded: bool,
    own: bool,
    tiny_checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "model"
    if own:
        shutil.copytree(tiny_checkpoint, folder)
    else:
        config = AutoConfig.for_model(
            "gpt_neox", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    edit_tensors(folder, lambda t: t.update({name: t[name].to(in_file) for name in t}))
    loader.load_model(folder, loader.load_config(folder), dtype, CPU).close()
    said = [record for record in caplog.records if "rounded" in record.message]
    assert bool(said) == rounded
    if said:
        count = len(load_file(folder / "model.safetensors"))
        assert [(r.tensors, r.model) for r in said] == [(count, str(folder))]  # type: ignore[attr-defined]
