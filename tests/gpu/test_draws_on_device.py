"""Draws on a device are those of a CPU: ``kernels/argmax.py``, ``core/execute/sampling.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plimsoll_engine.core.execute.sampling import SamplingRow, plan_sampling, sample
from plimsoll_engine.messages.worker_ipc import Sampling

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
ROWS, VOCABULARY = 512, 151_936


@pytest.mark.parametrize("knobs", [{}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.01}])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_a_draw_is_the_same_on_cpu_and_device(knobs: dict[str, Any], temperature: float) -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    rows = plan_sampling(
        [SamplingRow(Sampling(1, temperature=temperature, **knobs), i) for i in range(ROWS)]
    )
    there = sample(logits.cuda(), rows).tokens.cpu()
    here = sample(logits.clone(), rows).tokens
    # Logarithms differ in their last bit; a nucleus may end one token earlier or later.
    assert int((here != there).sum()) <= 1


def test_rows_of_no_numbers_have_no_token_on_a_device() -> None:
    logits = torch.full((3, 9_000), float("nan"), device="cuda")
    drawn = SamplingRow(Sampling(1, temperature=1.0, logprobs=2), 0)
    rows = [
        SamplingRow(Sampling(1), 0),
        drawn,
        SamplingRow(Sampling(1, temperature=1.0, top_p=0.5), 0),
    ]
    assert sample(logits, plan_sampling(rows)).tokens.tolist() == [-1, -1, -1]
    torch.cuda.synchronize()
