"""FP8 checkpoints and an FP8 pool served: the same text over restarts and by two ranks.

With weights in FP8 it is the text of the exact ones: the tiny model's best token is ahead by some
four of its logits' units. Its keys are the more sensitive part: with the pool in FP8 as well the
text is another one, and always the same.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_faults.models import tiny_moe
from plimsoll_faults.models.write_fp8 import write_fp8
from tests.generated import generate
from tests.ranks import started

STREAMS, TOKENS = 6, 200
REQUESTS, NEW_TOKENS = 8, 48


@pytest.fixture(scope="module")
def fp8(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    write_fp8(tiny, folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny checkpoint with experts, and the same in FP8."""
    folder = tmp_path_factory.mktemp("experts")
    tiny_moe.write_checkpoint(folder / "exact")
    write_fp8(folder / "exact", folder / "fp8")
    return folder / "exact", folder / "fp8"


def held(engine: Any, owner: str) -> int:
    (entry,) = (e for e in engine.status()["ledger"] if e["owner"] == owner)
    assert entry["bytes"] <= entry["bound"]
    return int(entry["bytes"])


def texts(engine: Any) -> list[str]:
    with engine.streams(STREAMS, TOKENS, temperature=0.0) as futures:
        return [future.result(120).text for future in futures]


FLAGS = ("--num-blocks", "500", "--block-size", "8")


def test_the_text_is_the_same_over_a_restart(engine: Any, start_engine: Any, fp8: Path) -> None:
    narrow = start_engine(*FLAGS, "--kv-cache-dtype", "fp8", model=fp8).wait_ready()
    undisturbed = texts(narrow)
    with narrow.streams(STREAMS, TOKENS, temperature=0.0) as futures:
        narrow.begin("restart", "fp8-1")
        operation = narrow.finish("fp8-1")
        found = [future.result(120).text for future in futures]
    assert operation["kv_handover"] == "handed_over"
    assert operation["carried_prefill_tokens"] == 0
    assert found == undisturbed
    assert len(set(found)) == STREAMS
    # Half of the tiny model is its embedding and its head, which stay as they are.
    assert held(narrow, "weights") < 0.55 * held(engine, "weights")
    # 4 layers, 2 heads, 16 dimensions and a scale.
    assert held(narrow, "kv_pool") == 500 * 8 * 2 * 4 * 2 * (16 + 4)
    narrow.clean()


def test_weights_alone_leave_the_text_as_it_is(engine: Any, start_engine: Any, fp8: Path) -> None:
    assert texts(start_engine(model=fp8).wait_ready()) == texts(engine)


@pytest.mark.long
def test_experts_in_fp8_leave_the_text_as_it_is_over_a_restart_and_a_crash(
    start_engine: Any, experts: tuple[Path, Path]
) -> None:
    exact, narrow = experts
    wide = start_engine(model=exact).wait_ready()
    expected, weights = texts(wide), held(wide, "weights")
    engine = start_engine(*FLAGS, model=narrow).wait_ready()
    assert texts(engine) == expected
    assert len(set(expected)) == STREAMS
    assert held(engine, "weights") < 0.55 * weights
    with engine.streams(STREAMS, TOKENS, temperature=0.0) as futures:
        engine.begin("restart", "experts-1")
        operation = engine.finish("experts-1")
        assert [future.result(120).text for future in futures] == expected
    assert operation["kv_handover"] == "handed_over"
    assert operation["carried_prefill_tokens"] == 0
    engine.clean()
    with engine.streams(STREAMS, TOKENS, temperature=0.0) as futures:
        os.kill(engine.worker_pid(), signal.SIGKILL)
        assert [future.result(120).text for future in futures] == expected
    engine.clean()
    assert held(engine, "weights") < 0.55 * weights


def run(engine: EngineCore) -> dict[str, list[int]]:
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = ([n * 3 + place + 40 for place in range(5 + 9 * n)] for n in range(REQUESTS))
    return generate(engine, (Submit(str(n), ids, sampling) for n, ids in enumerate(prompts)))


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.long), "experts"])
def test_two_ranks_make_the_tokens_of_one(
    fp8: Path, experts: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    torch.set_num_threads(1)
    folder = fp8 if kind == "dense" else experts[1]
    found = []
    for size in (1, 2):
        config = WorkerConfig(
            str(folder), str(tmp_path), "unused", "float32", "cpu", max_num_seqs=8,
            max_model_len=200, max_num_batched_tokens=24, block_size=4, num_blocks=100,
            tensor_parallel_size=size, kv_cache_dtype="fp8" if kind == "dense" else "auto",
        )  # fmt: skip
        with started(config) as (lifecycle, _):
            assert lifecycle.engine is not None
            found.append(run(lifecycle.engine))
            assert run_audit(lifecycle.engine, lifecycle.ledger)[2] == []
    assert found[0] == found[1]
    assert {len(tokens) for tokens in found[0].values()} == {NEW_TOKENS}
