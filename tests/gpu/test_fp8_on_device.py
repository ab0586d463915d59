"""FP8 weights and an FP8 pool on the GPU: logits, memory, kernels and a restart.

Tests ``kernels/scaled_product.py``, ``kernels/project.py`` and ``kernels/rotary.py``.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from bench.engine import exact_tensors, reference_logits
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.kernels import decode_attention, quantized
from plimsoll_engine.kernels.decode_partition import Partition
from plimsoll_engine.kernels.quantized import FP8, Quantized
from plimsoll_engine.kernels.scaled_product import scaled_product
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models.tiny import write_checkpoint
from plimsoll_faults.models.write_fp8 import write_fp8
from tests.generated import generate
from tests.integration.engine.conftest import Engine
from tests.logits import recorded
from tests.random_model import random_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="these tests need one GPU of compute capability 8.9 or higher",
)
LENGTHS, NEW_TOKENS = (1, 7, 100, 333, 1300), 24
SIZES: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Tensors of an earlier test that are only garbage yet would count into a baseline."""
    gc.collect()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    model = random_model(AutoConfig.for_model(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(0.5)
    model.to(torch.bfloat16).save_pretrained(folder / "exact")
    write_fp8(folder / "exact", folder / "fp8")
    gc.collect()
    return folder / "fp8"


def config(folder: Path, pool: str = "auto", **fields: Any) -> WorkerConfig:
    return WorkerConfig(
        str(folder), "/tmp", "unused", "bfloat16", "cuda", num_blocks=2048, kv_cache_dtype=pool,
        max_num_batched_tokens=512, max_num_seqs=8, max_model_len=2048, **fields,
    )  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, 2048, (n,), generator=generator).tolist() for n in LENGTHS]


def texts(engine: EngineCore) -> list[list[int]]:
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    submits = [Submit(str(number), ids, sampling) for number, ids in enumerate(prompts())]
    return list(generate(engine, submits).values())


def rms(distances: list[torch.Tensor]) -> float:
    return float(torch.cat(distances).square().mean().sqrt())


@pytest.mark.parametrize("pool", ["auto", "fp8"])
def test_logits_are_no_farther_from_the_exact_ones_than_the_meaning(
    checkpoint: Path, pool: str
) -> None:
    """Exact are the dequantized weights in float32; the meaning is each rounding in plain torch.
    Steps of one row round less, and whole prompts read keys that are not rounded."""
    lifecycle = CoreLifecycle(config(checkpoint, pool))
    engine = lifecycle.start()
    engine.runner.graphs = None
    seen = recorded(engine)
    said = texts(engine)
    model: Any = lifecycle.model
    settings = loader.load_config(checkpoint)
    wide = Decoder(settings, torch.float32)
    wide.bind(exact_tensors(model))
    narrow = Decoder(settings, torch.bfloat16, quantization=loader.read_quantization(settings))
    narrow.bind(model.get_parameters())
    ours, theirs, apart = [], [], []
    with torch.inference_mode():
        for number, (prompt, text) in enumerate(zip(prompts(), said, strict=True)):
            exact = reference_logits(wide, prompt, text)
            meant = reference_logits(narrow, prompt, text, FP8 if pool == "fp8" else None)
            found = torch.stack([seen[str(number), n].float() for n in range(NEW_TOKENS)])
            ours.append(found - exact)
            theirs.append(meant - exact)
            apart.append(found - meant)
    print(f"ours {rms(ours):.4f} meaning {rms(theirs):.4f} apart {rms(apart):.4f}")
    assert rms(ours) <= 1.1 * rms(theirs)
    del engine, model, wide, narrow, seen
    lifecycle.shut_down()


@pytest.mark.parametrize("pool", ["auto", "fp8"])
def test_graphs_make_the_same_text_and_all_memory_comes_back(
    checkpoint: Path, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the attention is cut by the number of rows, which padding changes: other roundings.
    monkeypatch.setattr(decode_attention, "choose_partition", lambda *_: Partition(64, 4))
    monkeypatch.setattr(Runner, "_has_short_prompts", lambda *_: False)
    found = []
    for graphs in (True, False):
        lifecycle = CoreLifecycle(config(checkpoint, pool))
        engine = lifecycle.start()
        while graphs and engine.runner.capture_next_graph():
            pass
        if not graphs:
            engine.runner.graphs = None
        found.append(texts(engine))
        assert run_audit(engine, lifecycle.ledger)[2] == []
        entries = {entry.owner: entry for entry in lifecycle.ledger.list_entries()}
        per_token = 2 * 4 * 4 * ((128 + 4) if pool == "fp8" else 256)
        assert entries["kv_pool"].bytes == 2048 * 16 * per_token
        del engine
        lifecycle.shut_down()
        allocated, baseline = lifecycle.get_allocated_after_shutdown()
        assert allocated == baseline
    # Batches are padded to the captured sizes, whose products the library may sum in another way.
    equal = [a == b for a, b in zip(*found, strict=True)]
    assert sum(equal) >= len(equal) - 1


@pytest.mark.parametrize("rows", [1, 2, 17, 256, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_real_sizes(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    weight = Quantized(*quantized.quantize(torch.randn(6144, 4096, device="cuda")))
    shift = torch.randn(6144, device="cuda").bfloat16() if bias else None
    found = scaled_product(x, weight, shift).double()
    values, scales = quantized.quantize(x)
    meant = (values.double() * scales.double()) @ (
        weight.values.double() * weight.scales.double()
    ).T
    meant = meant if shift is None else meant + shift.double()
    assert float((found - meant).norm() / meant.norm()) < 8e-3


def test_a_restart_hands_an_fp8_pool_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    write_fp8(tmp_path / "tiny", tmp_path / "fp8")
    engine = Engine(
        tmp_path / "fp8", tmp_path / "run", "--device", "cuda", "--num-blocks", "4096",
        "--kv-cache-dtype", "fp8", "--dtype", "bfloat16",
    )  # fmt: skip
    try:
        engine.wait_ready()
        with engine.streams(4, 600) as futures:
            engine.begin("restart", "gpu-fp8")
            operation = engine.finish("gpu-fp8", 60)
            found = [future.result(120) for future in futures]
        assert operation["kv_handover"] == "handed_over", operation
        assert operation["carried_prefill_tokens"] == 0, operation
        stopped = next(step for step in operation["steps"] if step["name"] == "stop_worker")
        assert stopped["before_bytes"] == stopped["after_bytes"], "all of the device came back"
        assert {stream.usage.completion_tokens for stream in found} == {600}
        engine.clean()
    finally:
        engine.end()
