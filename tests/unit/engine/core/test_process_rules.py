"""What outlives requests and engines by the process's own state: each leak put back is found.

Tests ``process/rules.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.core.execute.layer_graphs import LayerGraphs
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.process import rules
from plimsoll_engine.process.rules import FreezeCounter, find_method_caches, freeze_counter
from plimsoll_faults.defects import WorkerFaults, device, host


def rules_hit(engine: EngineCore) -> set[str]:
    return {finding.rule for finding in run_audit(engine, Ledger())[2]}


def serve(engine: EngineCore, faults: WorkerFaults, helpers: Any) -> None:
    for number in range(3):
        engine.submit(helpers.submit(f"r{number}", [number + 1] * 9, 2))
        helpers.finish(engine)
        faults.after_step(1)


@pytest.fixture
def served() -> Iterator[None]:
    """As in an engine that was started: what exists is frozen once."""
    gc.unfreeze()  # Python 3.12 starts with some frozen objects of its own
    freeze_counter.freeze()
    yield
    freeze_counter.unfreeze()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("served")
def test_a_freeze_that_nobody_pairs_is_found(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    assert rules_hit(engine) == set()
    faults = WorkerFaults("request_cycle:payload_bytes=1Ki,freeze_every=1", 1, engine)
    serve(engine, faults, helpers)
    gc.collect()  # in vain: that is the leak
    assert rules_hit(engine) == {"released_requests_die", "nothing_is_frozen_again"}
    gc.unfreeze()
    gc.collect()
    assert rules_hit(engine) == set()


def test_engines_of_one_process_share_what_is_frozen() -> None:
    gc.unfreeze()
    first = FreezeCounter()
    assert first.find_problems() == []  # nobody asked for it yet
    first.freeze()
    kept = [[number] for number in range(1000)]
    first.freeze()
    assert first.find_problems() == []
    first.unfreeze()
    assert gc.get_freeze_count() > len(kept)
    first.unfreeze()
    first.unfreeze()
    assert gc.get_freeze_count() == 0


def test_instances_in_a_methods_cache_are_found(make_engine: Any, helpers: Any) -> None:
    host.Rotary.compute_angle.cache_clear()
    engine = make_engine()
    faults = WorkerFaults("method_cache:bytes_per_request=1Ki", 1, engine)
    assert rules_hit(engine) == set()
    serve(engine, faults, helpers)
    assert rules_hit(engine) == {"methods_cache_no_instances"}
    assert find_method_caches() == [
        "the method Rotary.compute_angle has an lru_cache, "
        "which keeps the instances of 3 calls alive"
    ]
    host.Rotary.compute_angle.cache_clear()
    assert rules_hit(engine) == set()


def test_a_bounded_cache_on_a_method_is_found_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        @lru_cache(maxsize=2)  # noqa: B019 - the defect
        def encode(self, text: str) -> int:
            return len(text)

        @staticmethod
        @lru_cache(maxsize=2)
        def vocabulary() -> int:
            return 3

    Tokenizer.__module__ = rules.__name__
    monkeypatch.setattr(rules, "Tokenizer", Tokenizer, raising=False)
    assert Tokenizer().encode("a") + Tokenizer.vocabulary() == 4
    (problem,) = find_method_caches()
    assert "Tokenizer.encode has an lru_cache, which keeps the instances of 1 calls" in problem


def test_a_registry_of_the_kv_pool_is_found_while_the_engine_runs(
    make_engine: Any, helpers: Any
) -> None:
    engine = make_engine()
    faults = WorkerFaults("kept_kv", 1, engine)
    serve(engine, faults, helpers)
    assert rules_hit(engine) == {"kv_pool_has_its_owners_alone"}
    device.GLOBAL_TENSORS.clear()
    assert rules_hit(engine) == set()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_captured_layers_are_owners_of_the_pool(
    make_engine: Any, kv_dtype: torch.dtype | None, mapped: bool
) -> None:
    """Count them once, also where the pool is a view of memory that another process owns."""
    engine = make_engine(kv_dtype=kv_dtype)
    runner = engine.runner
    if mapped:
        runner.kv = runner.kv.view_as(runner.kv)
    capture: Any = None  # nothing is captured before the engine asks for it
    runner.layers = LayerGraphs(
        runner.model, runner.kv, runner.block_size, runner.kv_scales, capture, max_rows=128
    )
    assert rules_hit(engine) == set()


def test_a_stored_error_whose_frames_hold_the_pool_is_found(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()

    def fails(keys: torch.Tensor | None) -> None:
        raise RuntimeError(f"a forward over {keys is not None}")

    with pytest.raises(RuntimeError) as stored:
        fails(engine.runner.kv)
    assert rules_hit(engine) == {"kv_pool_has_its_owners_alone"}
    del stored
    gc.collect()
    assert rules_hit(engine) == set()


def test_graphs_that_somebody_keeps_hold_no_pool(
    monkeypatch: pytest.MonkeyPatch, make_engine: Any
) -> None:
    """A registry of graphs outlives the engine; their memory does not."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    runner = make_engine().runner
    model = runner.model
    kept = DecodeGraphs(model, runner.kv, 4, max_rows=8, max_blocks=4)
    assert kept.nbytes > 0
    kept.close()
    kept.close()
    assert kept.nbytes == 0
    left = [value for value in vars(kept).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in left) == 0
    assert all(value is not model for value in vars(kept).values())
