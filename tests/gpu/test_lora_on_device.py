"""LoRA adapters on CUDA: tokens as of a merged checkpoint, graphs for other steps, bytes back."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models.tiny import write_checkpoint
from tests.generated import generate
from tests.lora import merge, write_tiny_adapter

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
FIRST, SECOND, NEW_TOKENS = 1, 2, 48


def config(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        str(folder), "/tmp", "unused", "float32", "cuda", num_blocks=2048, max_num_seqs=16,
        max_num_batched_tokens=256, max_loras=2, max_lora_rank=8,
    )  # fmt: skip


def texts(engine: EngineCore, numbers: list[int], prompts: int = 5) -> dict[str, list[int]]:
    """Of some prompts with every adapter, all in one batch."""
    submits = []
    for place in range(prompts):
        for number in numbers:
            prompt = [10 + place + i % 90 for i in range(1 + 70 * place)]
            submit = Submit(f"{place} {number}", prompt, Sampling(NEW_TOKENS, ignore_eos=True))
            submits.append(msgspec.structs.replace(submit, adapter=number))
    return generate(engine, submits)


def test_adapters_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    write_checkpoint(base)
    folders = {0: base}
    replays = 0
    replay = DecodeGraphs.replay

    def counted(*arguments: object) -> object:
        nonlocal replays
        replays += 1
        return replay(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    gc.collect()
    lifecycle = CoreLifecycle(config(base))
    engine = lifecycle.start()
    adapters = engine.runner.adapters
    assert adapters is not None
    alone = texts(engine, [0])
    assert replays > 0, "an engine that takes adapters has graphs"
    torch.cuda.synchronize()
    before = lifecycle.measure_allocated_device_bytes()
    for layer, number in enumerate((FIRST, SECOND)):
        folder = write_tiny_adapter(tmp_path / f"adapter{number}", layer)
        adapters.load(f"adapter{number}", number, folder)
        folders[number] = merge(tmp_path / f"merged{number}", base, folder)
    replays = 0
    found = texts(engine, [0, FIRST, SECOND])
    assert replays == 0, "every step had an adapter"
    single = texts(engine, [FIRST], 1)  # its steps have one row
    assert single == {name: found[name] for name in single}
    assert texts(engine, [0]) == alone
    assert replays > 0
    for number in (FIRST, SECOND):
        adapters.unload(number)
    assert adapters.bytes == 0
    engine.reset_prefix_cache()
    # What the last step sampled stays until the next one: both times of steps without an adapter.
    torch.cuda.synchronize()
    assert lifecycle.measure_allocated_device_bytes() == before
    lifecycle.shut_down()
    assert lifecycle.measure_allocated_device_bytes() == lifecycle.device.baseline
    for number, folder in folders.items():
        other = CoreLifecycle(config(folder))
        for name, tokens in texts(other.start(), [0]).items():
            assert found[f"{name[:-1]}{number}"] == tokens, (number, name)
        other.shut_down()
