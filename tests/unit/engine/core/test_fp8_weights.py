"""FP8 checkpoints: what is read and what is refused, and how near the logits are.

Tests ``models/quantization.py`` and ``plimsoll_faults/models/write_fp8.py``.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.errors import LoadError
from plimsoll_engine.kernels import quantized
from plimsoll_engine.kernels.quantized import FP8, Quantized
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.worker_ipc import Submit
from plimsoll_engine.models import loader, quantization
from plimsoll_engine.weights.layout import compute_checksums, create_manifest, make_views
from plimsoll_faults.models import tiny_moe
from plimsoll_faults.models.write_fp8 import main, write_fp8
from tests.fp8_logits import load, logits_of, off, round_linear_layers, texts
from tests.lora import SIZES, write_adapter, write_model
from tests.random_model import random_model

GATE = "model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms of queries and keys, a head of its own: everything random."""
    folder = tmp_path_factory.mktemp("exact")
    model = random_model(AutoConfig.for_model(**SIZES, model_type="qwen3", head_dim=16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(0.5)  # a gain of 1: two would be the test of something chaotic
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fp8(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    write_fp8(exact, folder)
    return folder


def test_a_checkpoint_is_read_as_it_was_written(exact: Path, fp8: Path) -> None:
    was, written = load_file(exact / "model.safetensors"), load_file(fp8 / "model.safetensors")
    tensors = load(fp8).get_parameters()
    for name, tensor in was.items():
        if f"{name}_scale" not in written:
            assert torch.equal(written[name], tensor), name
    for matrix, names in {
        "qkv": [f"self_attn.{kind}_proj" for kind in "qkv"], "out": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"],
    }.items():  # fmt: skip
        paths = [f"model.layers.1.{name}" for name in names]
        values, scales = tensors[f"layers.1.{matrix}"], tensors[f"layers.1.{matrix}_scale"]
        assert (values.dtype, scales.dtype) == (FP8, torch.float32)
        assert torch.equal(scales, torch.cat([written[f"{p}.weight_scale"] for p in paths]))
        whole = torch.cat([was[f"{p}.weight"] for p in paths])
        # Three bits of mantissa: half a unit is a sixteenth of the value, or of the smallest
        # normal number, 2**-6, where it is below that.
        room = (whole.abs() / scales).clamp(min=2**-6) * scales / 16
        assert bool(((quantized.dequantize(values, scales) - whole).abs() <= room * 1.001).all())
    assert tensors["head"].dtype == torch.float32
    assert written[f"{GATE}.weight"].abs().float().amax(dim=1).eq(448).all()


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the field in ``folder``, a copy."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config[quantization.CONFIG_FIELD])
    path.write_text(json.dumps(config))


def group(config: dict[str, Any]) -> dict[str, Any]:
    return dict.__getitem__(config["config_groups"], "group_0")


GROUP = r"\.config_groups\.group_0"
REFUSED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (
        lambda c: c.update(quant_method="gptq"),
        ("quant_method must be 'compressed-tensors', got 'gptq'"),
    ),
    (
        lambda c: c.update(format="int-quantized"),
        ("format must be 'float-quantized', got 'int-quantized'"),
    ),
    (
        lambda c: c.update(quantization_status="frozen"),
        ("quantization_status must be .*, got 'frozen'"),
    ),
    (
        lambda c: c.update(kv_cache_scheme={"num_bits": 8}),
        ("kv_cache_scheme has the unsupported value"),
    ),
    (lambda c: c.update(transform_config={"a": 1}), "transform_config"),
    (lambda c: c.update(surprise=3), r"\.surprise is not supported, but has the value 3"),
    (lambda c: c.update(config_groups=[]), r"config_groups must be an object, got \[\]"),
    (
        lambda c: c["config_groups"].update(b=group(c)),
        ("config_groups must have exactly one group, got 2"),
    ),
    (lambda c: group(c).update(targets=["Conv"]), rf"{GROUP}\.targets must be .*, got \['Conv'\]"),
    (
        lambda c: group(c).update(format="pack-quantized"),
        (
            rf"{GROUP}\.format must be "
            r".*, got 'pack-quantized'"
        ),
    ),
    (lambda c: group(c).update(output_activations={"a": 1}), rf"{GROUP}\.output_activations"),
    (
        lambda c: group(c).pop("input_activations"),
        rf"{GROUP}\.input_activations must be an obj",
    ),
    (
        lambda c: group(c)["weights"].update(type="int"),
        (
            rf"{GROUP}\.weights\.type must be "
            r".*, got 'int'"
        ),
    ),
    (
        lambda c: group(c)["weights"].update(num_bits=4),
        rf"{GROUP}\.weights\.num_bits must be .*, got 4",
    ),
    (
        lambda c: group(c)["weights"].update(symmetric=False),
        rf"{GROUP}\.weights\.symmetric must be .*, got False",
    ),
    (lambda c: group(c)["weights"].update(strategy="tensor"), rf"{GROUP}\.weights\.strategy"),
    (
        lambda c: group(c)["weights"].update(group_size=128),
        rf"{GROUP}\.weights\.group_size must be .*, got 128",
    ),
    (lambda c: group(c)["weights"].update(new=[1]), rf"{GROUP}\.weights\.new is not supported"),
    (
        lambda c: group(c)["input_activations"].update(dynamic=False),
        rf"{GROUP}\.input_activations\.dynamic must be True, got False",
    ),
    (
        lambda c: group(c)["input_activations"].update(dynamic=1),
        rf"{GROUP}\.input_activations\.dynamic must be True, got 1",
    ),
    (lambda c: c.update(ignore="lm_head"), r"ignore must be a list of names, got 'lm_head'"),
    (
        lambda c: c.update(ignore=["lm_head", "re:(a+)+b"]),
        (
            r"ignore has the "
            r"unsupported pattern '\(a\+\)\+b'"
        ),
    ),
    (lambda c: c.update(ignore=["re:" + ".*" * 5]), "at most 4 repetitions"),
    (
        lambda c: c.update(ignore=["lm_head"] * 5000),
        "ignore must have at most 4096 entries, got 5000",
    ),
    (lambda c: c.update(ignore=[]), r"ignore must include lm_head"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_not_supported_is_named(
    change: Callable[[dict[str, Any]], Any], message: str, fp8: Path, tmp_path: Path
) -> None:
    shutil.copy(fp8 / "config.json", tmp_path)
    edit(tmp_path, change)
    with pytest.raises(LoadError, match=rf"config\.json: field quantization_config.*{message}"):
        loader.load_config(tmp_path)


def test_a_model_that_only_others_compute_is_refused(fp8: Path, tmp_path: Path) -> None:
    shutil.copy(fp8 / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "olmo2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        LoadError, match=r"quantization_config .* not supported for model_type olmo2"
    ):
        loader.load_config(tmp_path)


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


BROKEN: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (lambda t: t.pop(f"{GATE}.weight_scale"), rf"1 missing tensors: {GATE}\.weight_scale"),
    (
        lambda t: t.update({f"{GATE}.weight": t[f"{GATE}.weight"].float()}),
        rf"{GATE}\.weight in .* must have the dtype F8_E4M3, got F32",
    ),
    (
        lambda t: t.update({f"{GATE}.weight": t[f"{GATE}.weight"].view(torch.uint8).clone()}),
        rf"{GATE}\.weight in .* must have the dtype F8_E4M3, got U8",
    ),
    (
        lambda t: t.update({f"{GATE}.weight_scale": torch.ones(1)}),
        rf"{GATE}\.weight_scale in .* has the shape \(1,\) in the file, but \(96, 1\) in the model",
    ),
    (
        lambda t: t[f"{GATE}.weight_scale"][5].fill_(float("nan")),
        rf"{GATE}\.weight_scale in .* contains a negative or non-finite scale",
    ),
    (
        lambda t: t.update({f"{GATE}.weight_zero_point": torch.zeros(96, 1)}),
        rf"1 unexpected tensors: {GATE}\.weight_zero_point",
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_broken_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, fp8: Path, tmp_path: Path
) -> None:
    changed(fp8, tmp_path / "model", change)
    with pytest.raises(LoadError, match=message):
        load(tmp_path / "model")


def test_layers_that_are_ignored_keep_their_type(exact: Path, fp8: Path, tmp_path: Path) -> None:
    was = load_file(exact / "model.safetensors")

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if ".layers.0." in name or "down_proj" in name:
                tensors.pop(name)
        kept = {n: t for n, t in was.items() if ".layers.0." in n or "down_proj" in n}
        tensors.update(kept)

    changed(fp8, tmp_path / "model", restore)
    ignored = ["lm_head", "re:.*layers\\.0\\..*", "re:.*down_proj$"]
    edit(tmp_path / "model", lambda c: c.update(ignore=ignored))
    tensors = load(tmp_path / "model").get_parameters()
    kinds = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype == FP8}
    assert sorted(kinds) == [
        f"layers.{layer}.{name}" for layer in (1, 2) for name in ("gate_up", "out", "qkv")
    ]


def test_half_a_matrix_cannot_be_ignored(fp8: Path, tmp_path: Path) -> None:
    shutil.copy(fp8 / "config.json", tmp_path)
    edit(tmp_path, lambda c: c.update(ignore=["lm_head", GATE]))
    with pytest.raises(
        LoadError, match=rf"ignore matches {GATE} but not .*up_proj, which the engine fuses"
    ):
        loader.build_model(tmp_path, loader.load_config(tmp_path), torch.float32)


def test_routers_must_be_ignored(tmp_path: Path) -> None:
    tiny_moe.write_checkpoint(tmp_path / "exact")
    write_fp8(tmp_path / "exact", tmp_path / "fp8")
    edit(tmp_path / "fp8", lambda c: c.update(ignore=["lm_head"]))
    with pytest.raises(
        LoadError, match=r"ignore must match model\.layers\.0\.mlp\.gate, because FP8 .* router"
    ):
        loader.build_model(tmp_path / "fp8", loader.load_config(tmp_path / "fp8"), torch.float32)


@pytest.mark.parametrize("size", [1, 8])
def test_a_product_is_that_of_what_both_mean(size: int) -> None:
    """e4m3 rounds each factor by a sixteenth at most, by a uniform error of 1/16/sqrt(3) in the
    worst case, so that a sum of products is off by some 4 % of its own size; what is asserted
    against the meaning of both is float32's."""
    generator = torch.Generator().manual_seed(size)
    x, w = (torch.randn(*shape, generator=generator) for shape in ((size, 512), (64, 512)))
    bias = torch.randn(64, generator=generator)
    weight = Quantized(*quantized.quantize(w))
    found = quantized.product(x, weight, bias)
    values, scales = quantized.quantize(x)
    meant = (values.double() * scales.double()) @ (
        weight.values.double() * weight.scales.double()
    ).T + bias
    assert float((found - meant).norm() / meant.norm()) < 1e-6
    exact = x.double() @ w.double().T + bias
    off = float((found - exact).norm() / exact.norm())
    assert 0.01 < off < 0.05


@torch.inference_mode()
def simulated(exact: Path) -> torch.Tensor:
    """The same by transformers in float32, with the rounding put before each linear layer."""
    model = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    round_linear_layers(model)
    return torch.cat([model(text[None], use_cache=False).logits[0] for text in texts()])


def test_logits_are_those_of_the_roundings(
    exact: Path, fp8: Path, helpers: Any, tmp_path: Path, record_property: Any
) -> None:
    """Random weights pass each rounding on. How much more is lost than by weights in bfloat16 is
    what is asserted. A value of e4m3 is off by up to a sixteenth of itself and one of bfloat16 by a
    256th, and here both factors of each product are rounded."""
    narrow = tmp_path / "bfloat16"
    changed(exact, narrow, lambda t: t.update({name: x.bfloat16() for name, x in t.items()}))
    found, plain = logits_of(fp8, helpers), logits_of(exact, helpers)
    bfloat16 = off(logits_of(narrow, helpers), plain)
    difference = (found - plain).abs()
    agreement = float((found.argmax(-1) == plain.argmax(-1)).float().mean())
    for name, value in {
        "mean_difference": float(difference.mean()), "max_difference": float(difference.max()),
        "deviation_of_logits": float(plain.std()), "top1_agreement": agreement,
        "relative": off(found, plain), "relative_of_bfloat16": bfloat16,
    }.items():  # fmt: skip
        record_property(name, value)
        print(f"{name} {value:.4f}")
    # The rest is a rounding that falls to the other side of two values.
    assert off(found, simulated(exact)) < 0.01
    assert bfloat16 < off(found, plain) < 16 * 2**0.5 * bfloat16
    assert agreement > 0.7


def test_an_adapter_changes_a_quantized_model(tmp_path: Path, helpers: Any) -> None:
    """Its own tokens, as of the dequantized weights with the adapter merged into the products."""
    base = write_model(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "adapter", base)
    write_fp8(base, tmp_path / "fp8")
    model = load(tmp_path / "fp8")
    plain = {name for name in model.parts if not name.endswith("_scale")}
    assert {f"layers.0.{n}" for n in ("qkv", "out", "gate_up", "down")} <= plain
    runner = Runner(model, 70, 4)
    runner.adapters = LoadedAdapters(model, 1, 8)
    runner.adapters.load("one", 7, adapter)
    engine = EngineCore(runner, Scheduler(BlockPool(70, 4), 8, 24, 200))
    for name, number in (("base", 0), ("adapted", 7)):
        asked: Submit = helpers.submit(name, list(range(2, 20)), 12, ignore_eos=True)
        asked.adapter = number
        assert engine.submit(asked) is None
    texts = helpers.finish(engine)
    engine.close()
    assert texts["base"] != texts["adapted"]
    alone = EngineCore(
        Runner(load(tmp_path / "fp8"), 70, 4), Scheduler(BlockPool(70, 4), 8, 24, 200)
    )
    assert alone.submit(helpers.submit("base", list(range(2, 20)), 12, ignore_eos=True)) is None
    assert helpers.finish(alone)["base"] == texts["base"]
    alone.close()


def test_shared_weights_have_both_types(fp8: Path) -> None:
    """As the weight server lays them out, sums them and maps them."""
    config = loader.load_config(fp8)
    model = loader.build_model(fp8, config, torch.float32)
    assert model is not None
    manifest = create_manifest(model.get_parameters())
    flat = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    loader.bind_tensors(model, make_views(flat, manifest))
    loader.load_tensors(model, fp8)
    for name, tensor in load(fp8).get_parameters().items():
        assert torch.equal(
            tensor.view(torch.uint8), model.get_parameters()[name].view(torch.uint8)
        ), name
    before = compute_checksums(flat, manifest)
    place = manifest.places["layers.0.down_scale"]
    flat[place.offset] += 1
    changed = [
        name for name, value in compute_checksums(flat, manifest).items() if value != before[name]
    ]
    assert changed == ["layers.0.down_scale"]
    with pytest.raises(ValueError, match=r"layers\.0\.qkv must be .*, got torch\.float32"):
        loader.bind_tensors(model, {n: t.float() for n, t in model.get_parameters().items()})


def test_shards_are_written_as_shards(exact: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(exact, source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, its in files.items():
        save_file({name: tensors[name] for name in its}, source / file)
    index = {"weight_map": {name: file for file, its in files.items() for name in its}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    write_fp8(source, tmp_path / "target")
    written = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert written["metadata"]["total_size"] == sum(
        t.nbytes for f in files for t in load_file(tmp_path / "target" / f).values()
    )
    load(tmp_path / "target")


def test_what_cannot_be_written_is_said(
    fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["write_fp8", str(fp8), str(tmp_path / "again")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "cannot be quantized" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_the_writer_says_what_the_reader_takes() -> None:
    config = quantization.make_config()
    found = quantization.parse_config(copy.deepcopy(config))
    assert found == quantization.Quantization(quantization.NEVER_QUANTIZED)
    assert found.is_quantized(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"])
    assert not found.is_quantized(["lm_head"])
    assert quantization.parse_config(None) is None
    # As compressed-tensors writes it out again: with nulls where it has defaults.
    group(config)["format"] = None
    config |= {"ignore": None, "global_compression_ratio": 1.5, "sparsity_config": {}}
    assert quantization.parse_config(config, is_head_tied=True) == quantization.Quantization()
