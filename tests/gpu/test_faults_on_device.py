"""The faults that need a CUDA device: what each of them keeps grows, and nothing without one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.grammar.grammars import Vocabulary
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.messages.worker_ipc import Grammar, Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.defects import WorkerFaults
from plimsoll_faults.inject import InjectError
from plimsoll_faults.models.tiny import write_checkpoint
from tests.ranks import started

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
MIB = 1 << 20
Start = Callable[[str], tuple[CoreLifecycle, EngineCore, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return folder


def config(model: Path, run_dir: str = "/tmp", ranks: int = 1) -> WorkerConfig:
    return WorkerConfig(
        str(model), run_dir, "unused", "float32", "cuda", num_blocks=2048, max_num_seqs=16,
        max_num_batched_tokens=256, max_model_len=1024, tensor_parallel_size=ranks,
    )  # fmt: skip


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    """Starts an engine with one fault, all of its graphs captured."""
    lifecycles: list[CoreLifecycle] = []

    def make(text: str) -> tuple[CoreLifecycle, EngineCore, Any]:
        lifecycle = CoreLifecycle(config(checkpoint), vocabulary=Vocabulary.load(checkpoint))
        lifecycles.append(lifecycle)
        engine = lifecycle.start()
        while engine.runner.capture_next_graph():
            pass
        faults = WorkerFaults(text, 1, engine)
        return lifecycle, engine, faults

    yield make
    for lifecycle in lifecycles:
        lifecycle.shut_down()
    gc.collect()
    torch.cuda.empty_cache()


def serve(
    engine: EngineCore, faults: Any, count: int, length: int = 9, tokens: int = 8, **sampling: Any
) -> list[list[int]]:
    """One request after the other."""
    texts = []
    for number in range(count):
        asked = Sampling(max_tokens=tokens, ignore_eos=True, **sampling)
        assert engine.submit(Submit(f"r{number}", [5 + number] * length, asked)) is None
        text: list[int] = []
        while engine.has_work:
            output = engine.step()
            assert not output.dropped, output.dropped
            text += [token.token_id for token in output.tokens]
        texts.append(text)
        faults.after_step(1)
    torch.cuda.synchronize()
    return texts


def in_use(reserved: bool = False) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() if reserved else torch.cuda.memory_allocated()


def growth(engine: EngineCore, faults: Any, reserved: bool = False, **load: Any) -> int:
    """What eight more requests leave, once the first ones have warmed everything."""
    serve(engine, faults, 2, **load)
    before = in_use(reserved)
    serve(engine, faults, 8, **load)
    return in_use(reserved) - before


def test_nothing_grows_without_a_fault(start: Start) -> None:
    _, engine, faults = start("")
    assert growth(engine, faults) < MIB // 8
    assert growth(engine, faults, reserved=True) < 2 * MIB


def test_a_tensor_that_was_lent_is_kept_for_nobody(start: Start) -> None:
    _, engine, faults = start("ipc_unreleased:bytes_per_request=2Mi")
    assert abs(growth(engine, faults) - 8 * 2 * MIB) < MIB // 8
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    assert in_use() > 16 * MIB, "only the process that has gone could return them"


def test_slices_keep_the_hidden_states_of_whole_prompts(start: Start) -> None:
    _, engine, faults = start("slice_kept")
    grown = growth(engine, faults, length=200)
    (defect,) = faults.defects
    views = sum(kept.nbytes for kept in defect.kept)
    assert grown > 50 * views > 0


def test_a_graph_for_every_key_and_the_same_tokens(start: Start) -> None:
    _, sound, none = start("")
    expected = serve(sound, none, 6, length=40, tokens=48)
    lifecycle, engine, faults = start("graph_per_key")
    (defect,) = faults.defects
    sizes = sorted(engine.runner.graphs._graphs) if engine.runner.graphs is not None else []
    before = in_use(reserved=True)
    assert serve(engine, faults, 6, length=40, tokens=48) == expected
    # One row, and contexts of 41 to 88 tokens: a key for each number of blocks.
    keys = len(defect.graphs.keyed)
    assert keys >= 3
    assert in_use(reserved=True) - before >= keys * 2 * MIB
    assert sorted(defect.graphs._graphs) == sizes
    (entry,) = [e for e in lifecycle.ledger.list_entries() if e.owner == "cuda_graphs"]
    assert entry.bytes >= 2 * MIB
    assert entry.bound is None, "an owner without a bound explains nothing"


def test_failed_captures_keep_their_pools(start: Start) -> None:
    lifecycle, engine, faults = start("failed_capture:every_requests=1")
    grown = growth(engine, faults, reserved=True)
    (defect,) = faults.defects
    assert len(defect.kept) == 10
    assert all(isinstance(error, torch.OutOfMemoryError) for error in defect.kept)
    assert grown >= 8 * 2 * MIB
    rules = {finding.rule for finding in run_audit(engine, lifecycle.ledger)[2]}
    assert rules == {"kv_pool_has_its_owners_alone"}, "the frames hold the KV pool as well"
    assert len(serve(engine, faults, 1)[0]) == 8, "the engine still serves"


def test_grammar_masks_stay_on_the_device(start: Start) -> None:
    _, engine, faults = start("grammar_masks")
    grammar = Grammar("regex", "[a-z]{500}")
    grown = growth(engine, faults, tokens=16, grammar=grammar)
    (defect,) = faults.defects
    masks = defect.runner.masks
    assert {mask.device.type for mask in masks} == {"cuda"}
    assert len(masks) >= 10 * 16
    assert grown >= sum(mask.nbytes for mask in masks[-8 * 16 :])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="collectives need two CUDA devices")
def test_a_scratch_buffer_for_every_shape(checkpoint: Path, tmp_path: Path) -> None:
    with started(config(checkpoint, str(tmp_path), ranks=2)) as (lifecycle, _):
        engine = lifecycle.engine
        assert engine is not None
        for refused in ("graph_per_key", "failed_capture"):
            with pytest.raises(InjectError, match="needs --tensor-parallel-size=1"):
                WorkerFaults(refused, 1, engine)
        sound = WorkerFaults("", 1, engine)

        def serve_all(faults: Any) -> list[list[int]]:
            texts = []
            for length in range(20, 28):
                # A cached prefix would leave so few tokens that a captured step computes them.
                engine.reset_prefix_cache()
                texts += serve(engine, faults, 1, length=length)
            return texts

        expected = serve_all(sound)
        faults: Any = WorkerFaults("collective_scratch", 1, engine)
        before = in_use()
        assert serve_all(faults) == expected
        (defect,) = faults.defects
        assert len(defect.group.scratch) >= 8
        assert in_use() > before
        defect.group.scratch.clear()


def test_scratch_buffers_need_several_ranks(start: Start) -> None:
    message = "collective_scratch in PLIMSOLL_INJECT needs --tensor-parallel-size of at least 2"
    with pytest.raises(InjectError, match=message):
        start("collective_scratch")
