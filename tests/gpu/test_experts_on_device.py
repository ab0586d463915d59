"""Experts on CUDA: near to float32, in captured steps whose rows choose anew, and bytes back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.kernels.fused import FusedOps
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.quantized import Quantized, quantize
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models.tiny_moe import write_checkpoint
from tests.generated import generate

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
COUNT, CHOSEN, HIDDEN, WIDTH = 128, 8, 2048, 768
LENGTHS, NEW_TOKENS = (1, 2, 30, 200, 700, 64, 64, 9), 64


class Layer(NamedTuple):
    """A layer's router and experts."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def of(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """What the experts make of ``x`` in its dtype."""
        router, gate_up, down = (weight.to(x.dtype) for weight in self)
        return ops.compute_experts(x, router, gate_up, down, CHOSEN, True)


@pytest.fixture(scope="module")
def layer() -> Layer:
    """Random, in the sizes of Qwen3-30B-A3B and rounded to bf16."""
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, device="cuda", generator=generator)
        return drawn.div_(columns**0.5).bfloat16()

    return Layer(draw(COUNT, HIDDEN), draw(COUNT * 2 * WIDTH, HIDDEN), draw(COUNT * HIDDEN, WIDTH))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("rows", [1, 2, 63, 129, 300, 1537, 4096])
def test_bf16_is_as_near_to_float32_as_torch(layer: Layer, rows: int) -> None:
    """Every tile meets experts with no, few and many rows."""
    torch.manual_seed(rows)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    theirs, ours = layer.of(ReferenceOps(), x), layer.of(FusedOps(), x)
    assert torch.equal(ours, layer.of(FusedOps(), x)), "not the same twice"
    assert error(ours, theirs) < 0.01
    # Where two experts' scores are within the rounding of bf16, float32 may choose the other one.
    scores = (x.float() @ layer.router.float().T).sort(dim=-1, descending=True).values
    clear = scores[:, CHOSEN - 1] - scores[:, CHOSEN] > 0.05
    assert rows < 63 or int(clear.sum()) > rows // 8
    if clear.any():
        exact = layer.of(ReferenceOps(), x.float()[clear])
        assert error(ours[clear], exact) <= 1.05 * error(theirs[clear], exact)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="no FP8 before compute capability 8.9",
)
@pytest.mark.parametrize("rows", [1, 2, 63, 129, 300, 1537, 4096])
def test_quantized_weights_mean_the_same_as_in_torch(layer: Layer, rows: int) -> None:
    """In every tile. The rest is less than half of what the four roundings to e4m3 change: torch
    rounds to bf16 between gates and values, which moves some results to the next value of e4m3."""
    torch.manual_seed(rows)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    gate_up, down = (Quantized(*quantize(weight)) for weight in (layer.gate_up, layer.down))
    found = FusedOps().compute_experts(x, layer.router, gate_up, down, CHOSEN, True)
    assert torch.equal(
        found, FusedOps().compute_experts(x, layer.router, gate_up, down, CHOSEN, True)
    )
    meant = ReferenceOps().compute_experts(x, layer.router, gate_up, down, CHOSEN, True)
    rounding = error(found, layer.of(ReferenceOps(), x))
    assert 0.01 < rounding < 0.1
    assert error(found, meant) < rounding / 2


def test_a_captured_step_routes_each_replay_anew(layer: Layer) -> None:
    ops, rows = FusedOps(), 48
    x = torch.zeros(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.of(ops, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = layer.of(ops, x)
    spread = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    alike = spread[:1].expand(rows, HIDDEN)  # all go to the same eight experts
    for given in (spread, alike, spread * 3):
        x.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, layer.of(ops, x))


def texts(engine: EngineCore, lengths: tuple[int, ...]) -> dict[str, list[int]]:
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [
        [3 + (7 * number + 5 * place) % 500 for place in range(length)]
        for number, length in enumerate(lengths)
    ]
    return generate(engine, (Submit(str(n), ids, sampling) for n, ids in enumerate(prompts)))


def config(folder: Path, device: str) -> WorkerConfig:
    return WorkerConfig(
        str(folder), "/tmp", "unused", "float32", device, num_blocks=2048, max_num_seqs=16,
        max_num_batched_tokens=256,
    )  # fmt: skip


def test_tokens_are_those_of_a_cpu_and_every_byte_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)
    host = CoreLifecycle(config(tmp_path, "cpu"))
    expected = texts(host.start(), LENGTHS)
    host.shut_down()
    replays = 0
    replay = DecodeGraphs.replay

    def counted(*arguments: object) -> object:
        nonlocal replays
        replays += 1
        return replay(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    gc.collect()
    for captured in (True, False):
        lifecycle = CoreLifecycle(config(tmp_path, "cuda"))
        engine = lifecycle.start()
        if not captured:
            engine.runner.graphs = None
        replays = 0
        assert texts(engine, LENGTHS) == expected
        assert texts(engine, LENGTHS[:1])["0"] == expected["0"]
        assert (replays > 0) == captured
        assert run_audit(engine, lifecycle.ledger)[2] == []
        del engine
        lifecycle.shut_down()
        allocated, baseline = lifecycle.get_allocated_after_shutdown()
        assert allocated == baseline
