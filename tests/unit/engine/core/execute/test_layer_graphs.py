"""When the pieces of steps with prompts are captured. Tests ``core/execute/layer_graphs.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig

from plimsoll_engine.core.execute import layer_graphs
from plimsoll_engine.core.execute.layer_graphs import GraphPiece, LayerGraphs
from plimsoll_engine.models.decoder import Decoder

BLOCK = 16


class Again:
    """A piece that computes where a graph replays; how many there are."""

    live = 0

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute
        Again.live += 1

    def reset(self) -> None:
        Again.live -= 1


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_graphs, "CAPTURED_ROWS_STEP", 16)
    monkeypatch.setattr(layer_graphs, "MAX_PIECES_PER_CALL", 2)
    monkeypatch.setattr(Again, "live", 0)


def layers_of(layers: int, capture: Callable[[Callable[[], None]], GraphPiece]) -> LayerGraphs:
    config = AutoConfig.for_model(
        "llama", vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
    )  # fmt: skip
    model = Decoder(config, torch.float16)
    pool = torch.zeros(2, layers, 4 * BLOCK, 2, 32, dtype=torch.float16)
    return LayerGraphs(model, pool, BLOCK, None, capture, 32)


def test_pieces_are_captured_a_few_at_a_time() -> None:
    """A step takes none until all of its size are there."""
    layers = layers_of(5, Again)
    seen = []
    while layers.capture_next():
        seen.append((Again.live, layers.has_graph(32)))
    assert seen == [(2, False), (4, False), (5, True), (7, True), (9, True), (10, True)]
    layers.close()
    assert Again.live == 0
    assert not layers.capture_next()


def test_a_size_without_memory_is_not_to_be_had() -> None:
    """Its pieces are freed; smaller steps have theirs."""

    def capture(compute: Callable[[], None]) -> Again:
        if len(seen) == 1:
            seen.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(1)
        return Again(compute)

    seen: list[int] = []
    layers = layers_of(2, capture)
    while layers.capture_next():
        pass
    assert Again.live == 2
    assert [layers.has_graph(rows) for rows in (16, 17)] == [True, False]
