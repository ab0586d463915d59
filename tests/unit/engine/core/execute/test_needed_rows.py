"""The last layer computes the rows that somebody reads, and each as if it computed all.

Tests ``core/execute/needed_rows.py``, ``core/execute/forward.py`` and ``models/decoder.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoConfig

from plimsoll_engine.core.execute import needed_rows
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.inputs import collect_inputs, get_row_order
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters
from plimsoll_engine.core.execute.prompt_scores import list_scored_rows
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.distributed.group import Group
from plimsoll_engine.kernels import quantized
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.messages.worker_ipc import Sampling
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.decoder_parts import SCALE_SUFFIX
from plimsoll_engine.models.lora import Adapter, LoraDelta, find_targets
from plimsoll_engine.models.quantization import Quantization

BLOCK, VOCABULARY = 4, 96
ALL = 1 << 30
"""More rows than any step saves: every row is computed."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "norms": {"model_type": "qwen3"},
    "window": {"model_type": "mistral", "sliding_window": 9},
    "experts": {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "fp8": {"model_type": "qwen2"},
}  # fmt: skip


def parse_document(name: str) -> Decoder:
    """Every tensor random, biases and norms as well."""
    torch.set_num_threads(1)
    config = AutoConfig.for_model(**SIZES | MODELS[name])
    scaled = Quantization(("lm_head",)) if name == "fp8" else None
    model = Decoder(config, torch.float32, quantization=scaled)
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for part, meta in model.get_parameters().items():
        if part.endswith(SCALE_SUFFIX):
            continue
        drawn = torch.randn(meta.shape, generator=generator)
        drawn = drawn / meta.shape[-1] ** 0.5 if drawn.dim() == 2 else 1 + 0.3 * drawn
        if meta.dtype == FP8:
            drawn, tensors[part + SCALE_SUFFIX] = quantized.quantize(drawn)
        tensors[part] = drawn
    model.bind(tensors)
    return model


def adapters_of(model: Decoder) -> list[Adapter]:
    """Two that change every projection that one can, and one that changes values alone."""
    generator = torch.Generator().manual_seed(6)
    found = []
    for number in range(3):
        deltas: dict[tuple[int, str], list[LoraDelta]] = {}
        for path, target in find_targets(model.parts).items():
            if number == 2 and not path.endswith("v_proj"):
                continue
            a = torch.randn(3, target.columns, generator=generator) / target.columns**0.5
            b = torch.randn(target.rows, 3, generator=generator) / 2
            own = deltas.setdefault((target.layer, target.matrix), [])
            own.append(LoraDelta(target.first, a, b))
        found.append(Adapter(f"adapter-{number}", number, deltas, b""))
    return found


@dataclass(frozen=True)
class ScoredRows:
    """One request's part of a step."""

    computed: int
    count: int
    left: int = 0
    """Tokens behind it: the step ends in the middle of the prompt."""
    drafts: int = 0
    scored: int | None = None
    """Rows of the prompt that are scored already; None where none is to be."""
    outputs: int = 0
    """Tokens of it that are no prompt, as after a preemption."""
    adapter: int | None = None


def drawn_part(limit: int) -> st.SearchStrategy[ScoredRows]:
    decodes = st.builds(
        ScoredRows, st.integers(1, 30), st.just(1), drafts=st.integers(0, 3), adapter=numbers()
    )
    chunks = st.builds(
        ScoredRows,
        st.integers(0, 20),
        st.integers(1, limit),
        left=st.sampled_from([0, 0, 0, 7]),
        scored=st.sampled_from([None, None, 0, 5, 40]),
        outputs=st.sampled_from([0, 0, 1, 6]),
        adapter=numbers(),
    )
    return st.one_of(decodes, chunks)


def numbers() -> st.SearchStrategy[int | None]:
    return st.sampled_from([None, None, 0, 1, 2])


def chunks_of(step: list[ScoredRows], adapters: list[Adapter] | None = None) -> list[Chunk]:
    """In the order of their rows; no two requests share a block."""
    generator = np.random.default_rng(len(step))
    found, blocks = [], 0
    for number, part in enumerate(step):
        length = part.computed + part.count + part.left
        needed = -(-(length + part.drafts) // BLOCK)
        sampling = Sampling(max_tokens=9, prompt_logprobs=None if part.scored is None else 2)
        request = Request(
            str(number), generator.integers(VOCABULARY, size=length).tolist(),
            max(1, length - part.outputs), sampling, computed=part.computed,
            scored=part.scored or 0, block_ids=list(range(blocks, blocks + needed)),
            adapter=None if adapters is None or part.adapter is None else adapters[part.adapter],
        )  # fmt: skip
        blocks += needed
        drafts = generator.integers(VOCABULARY, size=part.drafts).tolist()
        found.append(Chunk(request, part.count, drafts=drafts))
    return sorted(found, key=get_row_order)


def inputs_of(chunks: list[Chunk]) -> Inputs:
    return collect_inputs(chunks, BLOCK, list_scored_rows(chunks))


@contextmanager
def saving(fewest: int) -> Iterator[None]:
    before, needed_rows.MIN_SKIPPED_ROWS = needed_rows.MIN_SKIPPED_ROWS, fewest
    try:
        yield
    finally:
        needed_rows.MIN_SKIPPED_ROWS = before


def play(
    model: Decoder, chunks: list[Chunk], fewest: int, kv_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor | None, list[torch.Tensor], torch.Tensor]:
    """Logits, scores and the whole pool of one step, after a pool of random keys and values."""
    blocks = sum(len(chunk.request.block_ids) for chunk in chunks)
    forward = Forward(model, blocks, BLOCK, kv_dtype=kv_dtype)
    forward.adapters = LoadedAdapters(model, 3, 3)
    assert forward.kv is not None
    generator = torch.Generator().manual_seed(9)
    forward.kv.copy_(torch.randn(forward.kv.shape, generator=generator))
    if forward.kv_scales is not None:
        forward.kv_scales.fill_(0.1)
    with saving(fewest):
        _, logits = forward.compute(inputs_of(chunks), chunks)
    scores = forward.scores
    told = [] if scores is None else [scores.chosen, scores.ranks, scores.top]
    return logits, told, forward.kv.float()


def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


STEPS = st.lists(drawn_part(30), min_size=1, max_size=6)
CAPTURED_ROWS_STEP = [
    ScoredRows(9, 1, drafts=2),
    ScoredRows(0, 30, scored=0),
    ScoredRows(6, 17, left=7),
    ScoredRows(0, 21, adapter=0),
]


@given(STEPS)
@example(CAPTURED_ROWS_STEP)
@example([ScoredRows(3, 9, left=7)])
@example([ScoredRows(4, 1, left=7, scored=0), ScoredRows(0, 12, scored=40)])
def test_the_rows_are_those_that_are_read_and_what_comes_after_them(step: list[ScoredRows]) -> None:
    inputs = inputs_of(chunks_of(step))
    read = {*inputs.last.tolist(), *inputs.scored.tolist()}
    ends = inputs.starts.tolist()
    owned = [
        [row for row in range(begin, end) if any(begin <= other <= row for other in read)]
        for begin, end in pairwise(ends)
    ]
    with saving(1):
        needed = needed_rows.find_needed_rows(inputs)
    if sum(map(len, owned)) == len(inputs.ids):
        assert needed is None
        return
    assert needed is not None
    assert [len(owned[s]) for s in needed.sequences] == np.diff(needed.starts).tolist()
    assert needed.rows.tolist() == [row for s in needed.sequences for row in owned[s]]
    assert sorted(needed.sequences) == [s for s, rows in enumerate(owned) if rows]
    lengths = np.diff(needed.starts)
    assert (lengths[: needed.decodes] == 1).all()
    assert (lengths[needed.decodes :] > 1).all()
    assert needed.longest == max(lengths[needed.decodes :], default=0)
    assert needed.rows[needed.last].tolist() == inputs.last.tolist()
    assert needed.rows[needed.scored].tolist() == inputs.scored.tolist()
    for field in (needed.rows, needed.sequences, needed.starts, needed.last, needed.scored):
        assert field.dtype == np.int32


def test_a_few_rows_are_not_worth_it() -> None:
    few, many = ([ScoredRows(0, needed_rows.MIN_SKIPPED_ROWS + more)] for more in (0, 1))
    assert needed_rows.find_needed_rows(inputs_of(chunks_of(few))) is None
    found = needed_rows.find_needed_rows(inputs_of(chunks_of(many)))
    assert found is not None
    assert found.rows.tolist() == [needed_rows.MIN_SKIPPED_ROWS]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return parse_document(request.param)


@given(step=STEPS)
@example(step=CAPTURED_ROWS_STEP)
@example(step=[ScoredRows(3, 9, left=7)])
@example(
    step=[
        ScoredRows(0, 20, adapter=1),
        ScoredRows(5, 11, left=7, adapter=2),
        ScoredRows(9, 1, adapter=0),
    ]
)
@hypothesis_settings(max_examples=25)
def test_a_step_is_the_one_that_computes_all_rows(model: Decoder, step: list[ScoredRows]) -> None:
    """Logits, log probabilities of prompts, and all keys and values."""
    chunks = chunks_of(step, adapters_of(model))
    logits, told, pool = play(model, chunks, 1)
    wanted, expected, whole = play(model, chunks, ALL)
    # A row of FP8 may round another way where its sums differ in the last bit.
    tolerance = 2e-2 if any(t.dtype == FP8 for t in model.get_parameters().values()) else 1e-5
    assert same(pool, whole, tolerance)
    assert (logits is None) == (wanted is None)
    if logits is not None and wanted is not None:
        assert logits.shape == wanted.shape
        assert same(logits, wanted, tolerance)
    assert len(told) == len(expected)
    for found, other in zip(told[:1] + told[2:], expected[:1] + expected[2:], strict=True):
        assert same(found, other, tolerance)


def test_an_fp8_pool(model: Decoder) -> None:
    chunks = chunks_of([*CAPTURED_ROWS_STEP, ScoredRows(0, 40)])
    logits, _, pool = play(model, chunks, 1, FP8)
    wanted, _, whole = play(model, chunks, ALL, FP8)
    assert logits is not None
    assert wanted is not None
    assert same(pool, whole, 2e-2)
    assert same(logits, wanted, 2e-2)


def test_a_cut_prompt_leaves_keys_and_values_alone(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the last layer is computed after them."""
    calls = []
    attend = ReferenceOps.attend

    def counted(self: Any, query: torch.Tensor, plan: Any, layer: int, *rest: Any) -> torch.Tensor:
        calls.append((layer, len(query)))
        return attend(self, query, plan, layer, *rest)

    monkeypatch.setattr(ReferenceOps, "attend", counted)
    assert play(model, chunks_of([ScoredRows(3, 20, left=7)]), 1)[0] is None
    assert calls == [(0, 20), (1, 20)]
    calls.clear()
    assert play(model, chunks_of([ScoredRows(3, 20), ScoredRows(7, 1)]), 1)[0] is not None
    assert calls == [(0, 21), (1, 21), (2, 2)]


class SharedOut(Group):
    """A group whose ranks keep a share of the stream each, as large sums of several do."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def get_residual_rows(
        self, ops: Ops, residual: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        self.asked.append(len(residual))
        whole = residual.clone()
        residual.fill_(torch.nan)
        return ops.gather_rows(whole, index)


def test_where_the_stream_is_shared_out_its_needed_rows_are_asked_for(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = chunks_of(CAPTURED_ROWS_STEP)
    wanted, expected, _ = play(model, chunks, ALL)
    group = SharedOut()
    monkeypatch.setattr(model, "group", group)
    logits, told, _ = play(model, chunks, 1)
    assert group.asked == [sum(chunk.rows for chunk in chunks)]
    assert logits is not None
    assert wanted is not None
    assert same(logits, wanted, 2e-2)
    assert same(told[0], expected[0], 2e-2)


@pytest.mark.parametrize("name", ["norms", "biases", "experts"])
def test_products_are_added_to_the_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large steps do it, in the rows of every layer and in the few of the last one."""
    model = parse_document(name)
    chunks = chunks_of(
        [
            ScoredRows(9, 1),
            ScoredRows(0, 30, scored=0),
            ScoredRows(6, 17, left=7),
            ScoredRows(0, 21),
        ]
    )
    wanted, expected, whole = play(model, chunks, ALL)
    added = 0
    add = ReferenceOps.add_product

    def counted(self: Any, x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> None:
        nonlocal added
        added += 1
        add(self, x, weight, into)

    monkeypatch.setattr(ReferenceOps, "min_add_rows", 1)
    monkeypatch.setattr(ReferenceOps, "add_product", counted)
    for fewest in (1, ALL):
        logits, told, pool = play(model, chunks, fewest)
        assert logits is not None
        assert wanted is not None
        assert same(logits, wanted)
        assert same(pool, whole)
        assert same(told[0], expected[0])
    # Products with a bias and experts are not: of those layers, the attention's alone is.
    assert added == 2 * {"norms": 6, "biases": 0, "experts": 4}[name]
