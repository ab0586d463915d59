"""Kernels are compiled and loaded before an engine serves, not while requests wait for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models import tiny, tiny_moe
from plimsoll_faults.models.write_fp8 import write_fp8

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
BATCHES = (1, 2, 3, 5, 8, 9, 16, 17)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200)


def variants() -> dict[str, int]:
    """How many variants of each of our kernels this process has loaded."""
    from triton.runtime.jit import JITFunction

    return {
        f"{module}.{name}": len(item.device_caches[torch.cuda.current_device()][0])
        for module in list(sys.modules)
        if module.startswith("plimsoll_engine.kernels.")
        for name, item in vars(sys.modules[module]).items()
        if isinstance(item, JITFunction)
    }


def play(engine: EngineCore, batches: tuple[int, ...]) -> None:
    """Requests of every length in batches of every size, prompts and decode steps mixed."""
    for count in batches:
        for number in range(count):
            length = LENGTHS[(number + count) % len(LENGTHS)]
            sampling = Sampling(max_tokens=3 + number % 4, ignore_eos=True)
            refused = engine.submit(Submit(f"{count}-{number}", [number + 3] * length, sampling))
            assert refused is None
        while engine.has_work:
            assert not engine.step().dropped


def write_dense_fp8(path: Path) -> None:
    tiny.write_checkpoint(path.with_name("whole"))
    write_fp8(path.with_name("whole"), path)


def write_experts_fp8(path: Path) -> None:
    tiny_moe.write_checkpoint(path.with_name("whole"))
    write_fp8(path.with_name("whole"), path)


@pytest.mark.parametrize(
    ("write", "kv_cache_dtype"),
    [
        (tiny.write_checkpoint, "auto"),
        (tiny_moe.write_checkpoint, "auto"),
        (write_dense_fp8, "fp8"),
        (write_experts_fp8, "auto"),
    ],
    ids=["dense", "experts", "fp8", "experts_fp8"],
)
def test_no_step_meets_a_kernel_that_others_like_it_have_not(
    tmp_path: Path, write: Callable[[Path], None], kv_cache_dtype: str
) -> None:
    write(tmp_path / "model")
    config = WorkerConfig(
        str(tmp_path / "model"), "/tmp", "unused", "bfloat16", "cuda", num_blocks=4096,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    lifecycle = CoreLifecycle(config)
    engine = lifecycle.start()
    engine.runner.graphs = None  # every step by its kernels
    earlier = variants()  # of other models in this process
    play(engine, (4, 17, 1))
    before = variants()
    assert sum(before.values()) > 4
    play(engine, BATCHES)
    engine.pool.reset_prefix_cache()
    play(engine, tuple(reversed(BATCHES)))
    after = variants()
    lifecycle.shut_down()
    by_splits = {name for name in after if name.endswith(("_decode_attention", "_combine_parts"))}
    grown = {name: (before[name], after[name]) for name in after if after[name] != before[name]}
    assert set(grown) <= by_splits, grown
    # Of each cut of a context into a power of two parts, one.
    assert all(after[name] - earlier.get(name, 0) <= 7 for name in by_splits), grown
