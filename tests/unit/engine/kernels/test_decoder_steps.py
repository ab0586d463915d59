"""A whole step by the kernels is the step by plain torch: long prompts, cut ones and decode rows.

Tests ``kernels/fused.py``, ``kernels/few_rows.py``, ``models/decoder.py``,
``core/execute/forward.py`` and ``core/execute/layer_graphs.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plimsoll_engine.core.execute import layer_graphs, needed_rows
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.inputs import collect_inputs, get_row_order
from plimsoll_engine.core.execute.layer_graphs import GraphCapturer, LayerGraphs
from plimsoll_engine.core.execute.prompt_scores import list_scored_rows
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.kernels import decode_partition, few_rows, fused, whole_prompts
from plimsoll_engine.kernels.fused import FusedOps
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.messages.worker_ipc import Sampling
from plimsoll_engine.models.decoder import Decoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's dot product takes bfloat16 for integers.
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
BLOCK = 16
LONG = (1540, 1800, 1800) if DEVICE.type == "cuda" else (50, 60, 60)
"""Prompts that are the library's; the interpreter runs a program for each token."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(17)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(
            decode_partition, "PARTITIONS", ((1 << 30, decode_partition.Partition(64, 4, 64)),)
        )  # one runs after the other
        monkeypatch.setattr(whole_prompts, "MIN_LIBRARY_ROWS", 48)
        monkeypatch.setattr(whole_prompts, "PADDED_LENGTH_MULTIPLE", 32)
        monkeypatch.setattr(FusedOps, "min_add_rows", 40)
        monkeypatch.setattr(needed_rows, "MIN_SKIPPED_ROWS", 8)


def parse_document(kind: str, layers: int = 2) -> Decoder:
    config = AutoConfig.for_model(
        kind, vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Decoder(config, NARROW)
    tensors = {}
    for name, meta in model.get_parameters().items():
        drawn = torch.randn(meta.shape)
        drawn = drawn / meta.shape[-1] ** 0.5 if drawn.dim() == 2 else 1 + 0.3 * drawn
        tensors[name] = drawn.to(DEVICE, NARROW)
    model.bind(tensors)
    return model


def request(number: int, computed: int, count: int, left: int, blocks: int, **fields: Any) -> Chunk:
    length = computed + count + left
    held = -(-length // BLOCK)
    tokens = array("i", torch.randint(96, (length,)).tolist())
    sampling = Sampling(max_tokens=9, **fields)
    return Chunk(
        Request(
            str(number), tokens, length, sampling, computed=computed,
            block_ids=list(range(blocks, blocks + held)),
        ),
        count,
    )  # fmt: skip


def step(scored: bool) -> list[Chunk]:
    """A decode row, a prompt that goes on and is cut again, one that ends, and whole ones."""
    wanted: list[tuple[int, int, int, dict[str, Any]]] = [
        (37, 1, 0, {}), (20, 19, 5, {}), (33, 21, 0, {}), *((0, rows, 0, {}) for rows in LONG)
    ]  # fmt: skip
    if scored:
        wanted[2] = (33, 21, 0, {"prompt_logprobs": 2})
    chunks: list[Chunk] = []
    for number, (computed, count, left, fields) in enumerate(wanted):
        blocks = sum(len(chunk.request.block_ids) for chunk in chunks)
        chunks.append(request(number, computed, count, left, blocks, **fields))
    return sorted(chunks, key=get_row_order)


def play(model: Decoder, ops: Ops, chunks: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    blocks = sum(len(chunk.request.block_ids) for chunk in chunks)
    forward = Forward(model, blocks, BLOCK)
    assert forward.kv is not None
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(forward.kv.shape, generator=generator)
    forward.kv.copy_(drawn.to(DEVICE))
    model._ops = forward._ops = ops
    _, logits = forward.compute(collect_inputs(chunks, BLOCK, list_scored_rows(chunks)), chunks)
    assert logits is not None
    return logits, forward.kv, forward.scores


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("kind", "scored", "apart"),
    [
        pytest.param("llama", False, 1, id="apart", marks=pytest.mark.long),
        pytest.param("qwen3", True, 1, id="apart-scored"),
        pytest.param("llama", True, 1 << 40, id="together-scored"),
    ],
)
def test_a_step_by_the_kernels(
    kind: str, scored: bool, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against one that computes all rows of all layers, and adds nothing in a product."""
    monkeypatch.setattr(fused, "MIN_SEPARATE_OUTPUTS", apart)
    model, chunks = parse_document(kind), step(scored)
    logits, kv, scores = play(model, FusedOps(), chunks)
    monkeypatch.setattr(needed_rows, "MIN_SKIPPED_ROWS", 1 << 40)
    monkeypatch.setattr(ReferenceOps, "min_add_rows", 1 << 40)
    wanted, pool, expected = play(model, ReferenceOps(), chunks)
    assert logits.shape == (5, 96)
    assert error(logits, wanted) < 2e-2
    assert error(kv, pool) < 1e-2
    assert (scores is not None) == scored
    if scored:
        assert error(scores.chosen, expected.chosen) < 2e-2


@pytest.mark.parametrize(("kind", "rows"), [("qwen3", 3), ("llama", 18)])
def test_a_decode_step_of_few_rows(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has kernels of its own, and a step with a prompt in it has not."""
    monkeypatch.setattr(FusedOps, "get_max_projection_rows", lambda ops, weight: 32)
    calls: list[int] = []
    product = few_rows.multiply_few_rows

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(x))
        return product(x, *rest)

    monkeypatch.setattr(few_rows, "multiply_few_rows", counted)
    model = parse_document(kind)
    decodes = [request(number, 16 + number % 16, 1, 0, 2 * number) for number in range(rows)]
    mixed = sorted([*decodes, request(rows, 0, 5, 0, 2 * rows)], key=get_row_order)
    head = 1
    for chunks, products in ((decodes, 4 * model.spec.layers + head), (mixed, head)):
        calls.clear()
        logits, kv, _ = play(model, FusedOps(), chunks)
        assert calls == [len(logits)] * products
        wanted, pool, _ = play(model, ReferenceOps(), chunks)
        assert error(logits, wanted) < 2e-2
        assert error(kv, pool) < 1e-2


class Again:
    """A captured piece on a CPU: it is computed once more."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute

    def reset(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_step_by_captured_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one size after the other write to the same tensors."""
    monkeypatch.setattr(layer_graphs, "CAPTURED_ROWS_STEP", 16)
    steps: list[list[tuple[int, int, int]]] = [
        [(20, 1, 0), (31, 1, 0), (17, 9, 4), (0, 11, 0)],
        [(0, 13, 0)],
        [(0, 3, 0), (0, 2, 0)],
        [(16, 14, 3)],  # nothing ends
    ]
    model = parse_document(kind, 3)
    model._ops = FusedOps()
    captured, plain = Forward(model, 16, BLOCK), Forward(model, 16, BLOCK)
    assert captured.kv is not None
    assert plain.kv is not None
    captured._ops = plain._ops = model._ops
    plain.kv.copy_(captured.kv.normal_())
    capture = GraphCapturer(torch.cuda.graph_pool_handle()) if DEVICE.type == "cuda" else Again
    captured.layers = LayerGraphs(model, captured.kv, BLOCK, None, capture, 40)
    while captured.capture_next_graph():
        assert captured.has_missing_graphs == captured.layers.has_uncaptured_sizes
    assert [captured.layers.has_graph(rows) for rows in (1, 48, 49)] == [True, True, False]
    assert torch.equal(captured.kv, plain.kv)  # the trials wrote nothing
    for wanted in steps:
        chunks: list[Chunk] = []
        for number, (computed, count, left) in enumerate(wanted):
            blocks = sum(len(chunk.request.block_ids) for chunk in chunks)
            chunks.append(request(number, computed, count, left, blocks))
        inputs = collect_inputs(sorted(chunks, key=get_row_order), BLOCK)
        found, expected = captured.compute(inputs)[1], plain.compute(inputs)[1]
        assert (found is None) == (expected is None) == (not len(inputs.last))
        if found is not None and expected is not None:
            assert error(found, expected) < 2e-2
        assert error(captured.kv, plain.kv) < 1e-2
    captured.close()
