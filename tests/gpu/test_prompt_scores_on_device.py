"""Log probabilities of prompts on CUDA are those of a CPU, in chunks and with graphs beside them.

Tests ``core/execute/prompt_scores.py``.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from plimsoll_engine.frontend.requests.prompt_scores import PromptScores
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models.tiny import write_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
LENGTHS, MOST, NEW_TOKENS = (1, 2, 33, 300, 700), 3, 16


def scores(folder: Path, device: str) -> list[PromptScores]:
    """Of prompts beside requests that ask for nothing, in steps of 128 tokens."""
    config = WorkerConfig(
        str(folder), "/tmp", "unused", "float32", device, num_blocks=1024, max_num_seqs=16,
        max_num_batched_tokens=128,
    )  # fmt: skip
    lifecycle = CoreLifecycle(config)
    engine = lifecycle.start()
    found = [PromptScores(length, MOST) for length in LENGTHS]
    for number, length in enumerate(LENGTHS):
        prompt = [3 + (7 * number + 5 * place) % 400 for place in range(length)]
        plain = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        asks = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=MOST)
        for name, sampling in ((f"plain-{number}", plain), (f"{number}", asks)):
            assert engine.submit(Submit(name, prompt, sampling)) is None
    while engine.has_work:
        output = engine.step()
        assert not output.dropped, output.dropped
        for message in output.scores:
            found[int(message.request_id)].add(message)
    assert run_audit(engine, lifecycle.ledger)[2] == []
    del engine
    lifecycle.shut_down()
    allocated, baseline = lifecycle.get_allocated_after_shutdown()
    assert allocated == baseline
    return found


def test_they_are_those_of_a_cpu_and_every_byte_comes_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    gc.collect()
    on_host, on_device = scores(tmp_path, "cpu"), scores(tmp_path, "cuda")
    for length, ours, theirs in zip(LENGTHS, on_device, on_host, strict=True):
        assert ours.is_complete
        for place in range(1, length):
            score, wanted = ours.get_score(place), theirs.get_score(place)
            assert score.logprob == pytest.approx(wanted.logprob, abs=1e-3)
            assert score.top == pytest.approx(wanted.top, abs=1e-3)
            assert len(score.top_ids) == MOST
