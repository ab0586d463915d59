"""Ranks on GPUs: the tokens and logits of one, and every byte given back on all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.device_memory import read_device_memory
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from tests.generated import generate
from tests.logits import recorded
from tests.ranks import GROUPS, started, write_for_four

MIB = 1 << 20
VOCABULARY = 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
}
LENGTHS = tuple(1 + 57 * number for number in range(32))
LOGITS_NOISE = 1.5
"""Several ranks round each sum once more, in shorter sums each."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_for_four(folder)
    return folder


@pytest.fixture(params=["dense", "experts"])
def dense_or_experts(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Path:
    if request.param == "dense":
        return tiny
    write_for_four(tmp_path / "model", experts=True)
    return tmp_path / "model"


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = AutoConfig.for_model(**SIZES, **MODELS[request.param])
    generator = torch.Generator().manual_seed(8)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.1 * noise if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5
            )
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    return folder


def config(model: Path, run_dir: Path, size: int, dtype: str) -> WorkerConfig:
    return WorkerConfig(
        str(model), str(run_dir), "unused", dtype, "cuda", max_num_seqs=16, max_model_len=2048,
        max_num_batched_tokens=512, num_blocks=1024, tensor_parallel_size=size,
    )  # fmt: skip


def texts(engine: EngineCore, prompts: list[list[int]], new: int) -> dict[str, list[int]]:
    sampling = Sampling(max_tokens=new, ignore_eos=True)
    return generate(engine, (Submit(str(n), ids, sampling) for n, ids in enumerate(prompts)))


def prompts_of(lengths: tuple[int, ...], vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("all_graphs", [False, True], ids=["first-graphs", "all-graphs"])
def test_greedy_tokens_of_several_ranks_are_those_of_one(
    dense_or_experts: Path, tmp_path: Path, all_graphs: bool, size: int
) -> None:
    """By kernels and graphs, in batches and one row alone."""
    found = []
    for ranks in (1, size):
        asked = config(dense_or_experts, tmp_path, ranks, "float32")
        with started(asked) as (lifecycle, processes):
            engine = lifecycle.engine
            assert engine is not None
            while all_graphs and engine.runner.capture_next_graph():
                pass
            together = texts(engine, prompts_of((5, 30, 200, 700, 1500, 64, 64, 9), 500), 64)
            alone = texts(engine, prompts_of((40,), 500), 64)
            found.append((together, alone))
            assert run_audit(engine, lifecycle.ledger)[2] == []
        assert [process.returncode for process in processes] == [0] * (ranks - 1)
    assert found[0] == found[1]


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
def test_bf16_logits_of_several_ranks_are_within_the_noise_of_one(
    checkpoint: Path, tmp_path: Path, size: int
) -> None:
    prompts = prompts_of(LENGTHS, VOCABULARY)
    found: dict[tuple[int, str], torch.Tensor] = {}
    kinds = ((1, "float32"), (1, "bfloat16"), (size, "bfloat16"), (size, "float32"))
    for ranks, dtype in kinds:
        # Quick: no graph is captured, and so every step's logits are made where they are seen.
        with started(config(checkpoint, tmp_path, ranks, dtype), quick=True) as (lifecycle, _):
            engine = lifecycle.engine
            assert engine is not None
            seen = recorded(engine)
            texts(engine, prompts, 1)
            rows = [seen[str(number), 0].float().cpu() for number in range(len(prompts))]
            found[ranks, dtype] = torch.stack(rows)
            del engine, seen
    exact = found[1, "float32"]
    error = {key: float((logits - exact).square().mean().sqrt()) for key, logits in found.items()}
    print(f"rms from one rank in float32: {error}; logits {float(exact.std()):.2f}")
    assert 0 < error[1, "bfloat16"] < 0.2 * float(exact.std())
    assert error[size, "bfloat16"] <= LOGITS_NOISE * error[1, "bfloat16"]
    assert error[size, "float32"] < 0.02 * error[1, "bfloat16"]


@pytest.fixture
def nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    yield
    pynvml.nvmlShutdown()


def used(size: int) -> list[int]:
    """Bytes in use on the first ``size`` devices, by all processes."""
    found = []
    for index in range(size):
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        found.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
    return found


@pytest.mark.parametrize("size", GROUPS)
def test_all_devices_are_given_back(tiny: Path, tmp_path: Path, nvml: None, size: int) -> None:
    gc.collect()  # models of other tests that wait for it would be part of the baseline
    after = []
    for _ in range(3):
        with started(config(tiny, tmp_path, size, "bfloat16")) as (lifecycle, processes):
            engine = lifecycle.engine
            assert engine is not None
            while engine.runner.capture_next_graph():
                pass
            texts(engine, prompts_of((30, 700), 500), 16)
            leader = lifecycle.member.leader
            assert leader is not None
            reports = leader.get_memory_reports()
            devices = read_device_memory(engine.runner.device)
            for report in reports:
                devices += report.devices
            assert [device.index for device in devices] == list(range(size))
            assert len({device.uuid for device in devices}) == size
            assert all(report.graph_bytes > 0 for report in reports)
            pool = engine.runner.kv_bytes // size
            assert all(d.torch_allocated and d.torch_allocated >= pool for d in devices)
            del engine
        assert [process.returncode for process in processes] == [0] * (size - 1)
        allocated, baseline = lifecycle.get_allocated_after_shutdown()
        assert allocated is not None
        assert allocated == baseline
        after.append(used(size))
    # The first cycle makes this process's context.
    for device in range(size):
        assert abs(after[-1][device] - after[0][device]) <= 64 * MIB, after
