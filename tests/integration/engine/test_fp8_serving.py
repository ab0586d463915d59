"""FP8 checkpoints served: the text of the exact weights, over restarts and by two ranks.

The tiny model's best token is ahead by some four of its logits' units, which e4m3 does not take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.memory.audit import audit
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models.write_fp8 import write_fp8
from tests.ranks import started

STREAMS, TOKENS = 6, 200
REQUESTS, NEW_TOKENS = 8, 48


@pytest.fixture(scope="module")
def fp8(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    write_fp8(tiny, folder)
    return folder


def weights(engine: Any) -> int:
    (entry,) = (e for e in engine.status()["ledger"] if e["owner"] == "weights")
    return int(entry["bytes"])


def texts(engine: Any) -> list[str]:
    with engine.streams(STREAMS, TOKENS, temperature=0.0) as futures:
        return [future.result(120).text for future in futures]


def test_the_text_is_that_of_the_exact_weights_over_a_restart(
    engine: Any, start_engine: Any, fp8: Path
) -> None:
    quantized = start_engine(model=fp8).wait_ready()
    exact = texts(engine)
    with quantized.streams(STREAMS, TOKENS, temperature=0.0) as futures:
        quantized.begin("restart", "fp8-1")
        operation = quantized.finish("fp8-1")
        found = [future.result(120).text for future in futures]
    assert operation["kv_handover"] == "handed_over"
    assert operation["carried_prefill_tokens"] == 0
    assert found == exact
    assert len(set(exact)) == STREAMS
    # Half of the tiny model is its embedding and its head, which stay as they are.
    assert weights(quantized) < 0.55 * weights(engine)
    quantized.clean()
    assert texts(quantized) == exact


def run(engine: EngineCore) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {str(number): [] for number in range(REQUESTS)}
    for number in range(REQUESTS):
        prompt = [number * 3 + place + 40 for place in range(5 + 9 * number)]
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        assert engine.submit(Submit(str(number), prompt, sampling)) is None
    while engine.has_work:
        output = engine.step()
        assert not output.dropped, output.dropped
        for token in output.tokens:
            found[token.request_id].append(token.token_id)
    return found


def test_two_ranks_make_the_tokens_of_one(fp8: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = []
    for size in (1, 2):
        config = WorkerConfig(
            str(fp8), str(tmp_path), "unused", "float32", "cpu", max_num_seqs=8,
            max_model_len=200, max_num_batched_tokens=24, block_size=4, num_blocks=100,
            tensor_parallel_size=size,
        )  # fmt: skip
        with started(config) as (lifecycle, _):
            assert lifecycle.engine is not None
            found.append(run(lifecycle.engine))
            assert audit(lifecycle.engine, lifecycle.ledger)[2] == []
    assert found[0] == found[1]
    assert {len(tokens) for tokens in found[0].values()} == {NEW_TOKENS}
