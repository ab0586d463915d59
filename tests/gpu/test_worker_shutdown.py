"""On CUDA: shutdown gives device memory back exactly, and text equals the CPU's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.memory.device_memory import read_device_memory
from plimsoll_engine.memory.trim import trim
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process.host_memory import PythonMemoryEstimator
from plimsoll_engine.worker import lifecycle as lifecycle_module
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models.tiny import write_checkpoint
from tests.generated import generate

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gc.collect()  # models of other tests that wait for it would be part of the baseline
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return folder


def config(checkpoint: Path, device: str = "cuda", dtype: str = "float32") -> WorkerConfig:
    # 1,048,576 tokens at 1 KiB (float32): a KV pool of 1 GiB on the GPU.
    blocks = 65_536 if device == "cuda" else 512
    return WorkerConfig(str(checkpoint), "/tmp", "unused", dtype, device, num_blocks=blocks)


def texts(engine: EngineCore, count: int = 8, new: int = 64) -> dict[str, list[int]]:
    return generate(
        engine,
        (Submit(f"r{i}", [10 + i] * (5 + 30 * i), Sampling(max_tokens=new)) for i in range(count)),
    )


def success(lifecycle: CoreLifecycle) -> None:
    texts(lifecycle.start())


def forward_error(lifecycle: CoreLifecycle) -> None:
    engine = lifecycle.start()
    model: Any = engine.runner.model
    forward = model.forward

    def fails(*arguments: object) -> object:
        kept = forward(*arguments)
        raise RuntimeError(f"broken forward after {kept.shape}")

    model.forward = fails
    engine.submit(Submit("r", [5] * 90, Sampling(max_tokens=4)))  # too many for a captured step
    assert "broken forward" in engine.step().dropped[0].message


def at_work(lifecycle: CoreLifecycle) -> None:
    engine = lifecycle.start()
    engine.submit(Submit("r", [5] * 900, Sampling(max_tokens=400)))
    for _ in range(3):
        engine.step()


def failed_start(stage: str) -> Callable[[CoreLifecycle], None]:
    def act(lifecycle: CoreLifecycle) -> None:
        def fails(*_: object) -> object:
            raise RuntimeError(f"{stage} failed")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lifecycle_module, stage, fails)
            with pytest.raises(RuntimeError, match="failed"):
                lifecycle.start()

    act.__name__ = f"failed_start_{stage}"
    return act


ENDS = [
    success,
    forward_error,
    at_work,
    *map(failed_start, ("load_kernels", "Runner", "Scheduler", "warm_up")),
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_shutdown_returns_to_the_baseline_exactly(
    end: Callable[[CoreLifecycle], None], checkpoint: Path
) -> None:
    lifecycle = CoreLifecycle(config(checkpoint))
    peak_before = torch.cuda.max_memory_allocated()
    end(lifecycle)
    lifecycle.shut_down()
    assert lifecycle.measure_allocated_device_bytes() == lifecycle.device.baseline
    assert torch.cuda.memory_reserved() == lifecycle.device.baseline
    if end is success:
        assert torch.cuda.max_memory_allocated() > max(peak_before, 0) or peak_before > GIB


def test_ten_restarts_in_one_process_keep_no_byte(checkpoint: Path) -> None:
    used = []
    for _ in range(10):
        lifecycle = CoreLifecycle(config(checkpoint))
        success(lifecycle)
        (device,) = read_device_memory(torch.device("cuda", 0))
        assert device.torch_allocated is not None
        assert device.torch_allocated >= GIB
        lifecycle.shut_down()
        assert lifecycle.measure_allocated_device_bytes() == lifecycle.device.baseline
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    # The first cycle loads libraries and kernels; nothing grows after it.
    assert max(used[1:]) == min(used[1:]), used


def test_text_on_the_gpu_equals_text_on_the_cpu(checkpoint: Path) -> None:
    found = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        lifecycle = CoreLifecycle(config(checkpoint, device, dtype))
        engine = lifecycle.start()
        begun = time.monotonic()
        found[device, dtype] = texts(engine)
        steps = engine.counters.steps
        print(f"{device} {dtype}: {1e3 * (time.monotonic() - begun) / steps:.2f} ms a step")
        lifecycle.shut_down()
    assert found["cuda", "float32"] == found["cpu", "float32"]
    assert all(len(tokens) == 64 for tokens in found["cuda", "bfloat16"].values())


def test_a_short_prompt_is_computed_by_a_captured_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and beside decode rows; a long one is not."""
    replayed: list[int] = []
    replay = DecodeGraphs.replay

    def counted(graphs: DecodeGraphs, inputs: Any, newest: Any) -> Any:
        replayed.append(len(inputs.ids))
        return replay(graphs, inputs, newest)

    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    lifecycle = CoreLifecycle(config(checkpoint))
    engine = lifecycle.start()
    rows = []
    for name, length in (("a", 16), ("b", 40), ("c", 65)):
        prompt = [length + place for place in range(length)]
        engine.submit(Submit(name, prompt, Sampling(max_tokens=9, ignore_eos=True)))
        replayed.clear()
        engine.step()
        rows.append(list(replayed))
    lifecycle.shut_down()
    assert rows == [[16], [41], []]


def test_a_trim_gives_reserved_memory_back(checkpoint: Path) -> None:
    lifecycle = CoreLifecycle(config(checkpoint))
    engine = lifecycle.start()
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    del block
    steps = {step.name: step for step in trim(engine, PythonMemoryEstimator())}
    lifecycle.shut_down()
    returned = steps["empty_cache"]
    assert returned.before_bytes is not None
    assert returned.after_bytes is not None
    assert returned.before_bytes - returned.after_bytes >= GIB
