"""Tokens of prompts as decode rows of their own.

Tests ``core/execute/inputs.py`` and ``core/execute/runner.py``.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from plimsoll_engine.core.execute.inputs import collect_inputs, get_row_order
from plimsoll_engine.core.execute.runner import MAX_SHORT_STEP_CONTEXT, MAX_SHORT_STEP_ROWS, Runner
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.messages.worker_ipc import Sampling
from plimsoll_engine.models.decoder import Decoder

BLOCK = 4


def chunk(number: int, computed: int, count: int, left: int = 0, drafts: int = 0) -> Chunk:
    """``count`` tokens of a request with 10 blocks of its own, and ``left`` ones for later."""
    length = computed + count + left
    tokens = array("i", [(7 * number + 3 * token) % 90 for token in range(length)])
    blocks = list(range(10 * number, 10 * number + 10))
    request = Request(str(number), tokens, length, Sampling(9), computed=computed, block_ids=blocks)
    return Chunk(request, count, drafts=[5 + number] * drafts)


def test_each_token_of_a_prompt_is_a_row() -> None:
    chunks = [chunk(0, 6, 1, drafts=2), chunk(1, 3, 2), chunk(2, 0, 3, left=1)]
    found = collect_inputs(chunks, BLOCK, as_decode_rows=True)
    assert found.is_decode_only
    assert (found.decodes, found.longest, found.fresh) == (8, 0, ())
    assert found.positions.tolist() == [6, 7, 8, 3, 4, 0, 1, 2]
    assert found.contexts.tolist() == [7, 8, 9, 4, 5, 1, 2, 3]
    assert found.starts.tolist() == list(range(9))
    assert found.slots.tolist() == [6, 7, 8, 43, 44, 80, 81, 82]
    assert found.last.tolist() == [0, 1, 2, 4], "a prompt that is cut gets no token"
    assert np.array_equal(found.ids, collect_inputs(chunks, BLOCK).ids)


def model() -> Decoder:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    made = Decoder(config, torch.float32)
    generator = torch.Generator().manual_seed(5)
    made.bind(
        {
            name: torch.randn(meta.shape, generator=generator) / meta.shape[-1] ** 0.5
            for name, meta in made.get_parameters().items()
        }
    )
    return made


def test_rows_of_a_prompt_make_what_the_prompt_makes() -> None:
    chunks = [chunk(0, 6, 1), chunk(1, 3, 2), chunk(2, 0, 9), chunk(3, 5, 8, left=2)]
    chunks.sort(key=get_row_order)
    found = []
    for by_row in (False, True):
        runner = Runner(model(), 40, BLOCK)
        assert runner.kv is not None
        drawn = torch.randn(runner.kv.shape, generator=torch.Generator().manual_seed(3))
        runner.kv.copy_(drawn)
        with torch.inference_mode():
            _, logits = runner.compute(collect_inputs(chunks, BLOCK, as_decode_rows=by_row), chunks)
        assert logits is not None
        found.append((logits, runner.kv))
    assert len(found[0][0]) == 3
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-4)


@pytest.mark.parametrize(
    ("chunks", "captured", "expected"),
    [
        ([chunk(0, 6, 1), chunk(1, 0, 16)], 256, True),
        ([chunk(0, 6, 1), chunk(1, 6, 1)], 256, False),  # no prompt among them
        ([chunk(1, 0, MAX_SHORT_STEP_ROWS)], 256, True),
        ([chunk(0, 6, 1), chunk(1, 0, MAX_SHORT_STEP_ROWS)], 256, False),
        ([chunk(1, 0, 16)], 8, False),
        ([chunk(1, 0, 16)], 0, False),
        ([chunk(1, MAX_SHORT_STEP_CONTEXT // 16 - 16, 16)], 256, True),
        ([chunk(1, MAX_SHORT_STEP_CONTEXT // 16, 16)], 256, False),
    ],
)
def test_which_prompts_a_captured_step_computes(
    chunks: list[Chunk], captured: int, expected: bool
) -> None:
    runner = cast(Any, object.__new__(Runner))
    graphs = SimpleNamespace(has_graph=lambda rows: rows <= captured)
    runner.graphs = graphs if captured else None
    assert runner._has_short_prompts(chunks) is expected
    for one in chunks:
        one.request.adapter = cast(Any, object())
    assert not runner._has_short_prompts(chunks)
