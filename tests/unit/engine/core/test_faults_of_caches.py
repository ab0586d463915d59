"""Host blocks that stay pinned, what adapters leave behind, and a cache that is sound.

Tests ``defects/caches.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters
from plimsoll_engine.core.execute.sampling import plan_sampling
from plimsoll_engine.core.grammar.grammars import Vocabulary
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.memory.lost import count_lost_host_blocks
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process import host_memory
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.defects import WorkerFaults
from plimsoll_faults.defects.device import MaskLeakRunner
from plimsoll_faults.tampering import replace_methods
from tests.lora import write_adapter, write_model

BLOCKS, SLOTS, PROMPTS = 32, 48, 8


def rules_hit(engine: Any, ledger: Ledger | None = None) -> set[str]:
    return {finding.rule for finding in run_audit(engine, ledger or Ledger())[2]}


def serve_prefixes(engine: EngineCore, helpers: Any, first: int) -> None:
    """The prompts in turn, three times: of 6 blocks each, more than the device has in all, and no
    more than the host has."""
    for number in [*range(first, first + PROMPTS)] * 3:
        engine.submit(helpers.submit(f"r{number}", [number * 7 + k for k in range(21)], 2))
        helpers.finish(engine)
        for _ in range(4):
            engine.poll(is_idle=True)


@pytest.mark.parametrize("text", ["", "offload_pinned"])
def test_host_blocks_that_came_back_stay_pinned(text: str, make_engine: Any, helpers: Any) -> None:
    engine: EngineCore = make_engine(num_blocks=BLOCKS, block_size=4)
    assert engine.runner.kv is not None
    block_bytes = engine.runner.kv.nbytes // BLOCKS
    offload = Offload.create(engine.pool, engine.runner.kv, SLOTS * block_bytes)
    assert count_lost_host_blocks(engine) is None, "without an offload: unknown, not zero"
    engine.scheduler.offload = offload
    WorkerFaults(text, 1, engine)
    serve_prefixes(engine, helpers, first=0)
    brought, pinned = offload.loaded_total, offload.stored.num_pinned
    assert brought > SLOTS // 2
    before = set(offload.stored)
    serve_prefixes(engine, helpers, first=PROMPTS)
    still_there = before & set(offload.stored)
    assert engine.pool.num_used == 0
    if text:
        assert pinned > SLOTS // 2
        assert len(still_there) >= pinned, "others can have the rest alone"
        assert offload.stored.num_pinned >= pinned
        assert rules_hit(engine) == {"offload_adds_up"}
        assert count_lost_host_blocks(engine) == offload.stored.num_pinned
    else:
        assert (pinned, offload.stored.num_pinned) == (0, 0)
        assert len(still_there) < SLOTS // 4
        assert rules_hit(engine) == set()
        assert count_lost_host_blocks(engine) == 0
    engine.reset_prefix_cache()
    assert len(offload.stored) == offload.stored.num_pinned, "a trim returns none of them"


def test_unloaded_adapters_leave_their_host_copies(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    folder = write_adapter(tmp_path / "adapter", base, rank=8)
    config = WorkerConfig(
        str(base), "/tmp", "unused", "float32", "cpu", num_blocks=32, max_loras=1, max_lora_rank=8
    )
    lifecycle = CoreLifecycle(config)
    try:
        engine = lifecycle.start()
        adapters = engine.runner.adapters
        assert adapters is not None
        defect: Any = WorkerFaults("lora_residue", 1, engine).defects[0]
        assert engine.runner.adapters is adapters, "the ledger asks the same object"
        one = 0
        for number in range(1, 5):
            adapters.load("sql", number, folder)
            one = adapters.bytes
            assert isinstance(adapters, LoadedAdapters)
            adapters.unload(number)
            assert adapters.bytes == 0
        kept = [d for deltas in defect.adapters.residue for ds in deltas.values() for d in ds]
        assert sum(delta.a.nbytes + delta.b.nbytes for delta in kept) == 4 * one > 0
        assert {delta.a.device for delta in kept} == {torch.device("cpu")}
        # The ledger counts what serves: the residue is in malloc alone, outside of every account.
        assert rules_hit(engine, lifecycle.ledger) == set()
    finally:
        lifecycle.shut_down()


@pytest.mark.parametrize("bound", ["low", "true"])
def test_a_sound_cache_fills_whatever_it_declared(bound: str, tiny_checkpoint: Path) -> None:
    config = WorkerConfig(str(tiny_checkpoint), "/tmp", "unused", "float32", "cpu", num_blocks=32)
    lifecycle = CoreLifecycle(config, vocabulary=Vocabulary.load(tiny_checkpoint))
    try:
        engine, ledger = lifecycle.start(), lifecycle.ledger
        true = engine.grammars.bytes_bound
        text = f"cache_fills:text_bytes=16Ki,bound={bound}"
        faults = WorkerFaults(text, 1, engine)
        declared = []
        before = host_memory.read_malloc_bytes()[0]
        for _ in range(4):
            faults.after_step(12)
            (entry,) = [e for e in ledger.list_entries() if e.owner == "grammar_cache"]
            declared.append(entry.bytes)
        after = host_memory.read_malloc_bytes()[0]
        assert before is not None
        assert after is not None
        assert after > before
        assert entry.bound is not None
        assert max(declared) <= true, "the cache itself is sound"
        assert declared[-1] == declared[-2] > true // 2, "it is full and stays so"
        if bound == "low":
            assert entry.bound < true // 3
            assert rules_hit(engine, ledger) == {"ledger_within_bounds"}
        else:
            assert entry.bound == true
            assert rules_hit(engine, ledger) == set()
    finally:
        lifecycle.shut_down()


def test_each_mask_is_kept_once_a_step(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism of grammar_masks, which the fault itself has on a device alone."""
    engine = make_engine()
    keeper = replace_methods(engine.runner, MaskLeakRunner)
    keeper.masks = []
    made = plan_sampling([])
    made.masked_rows, made.masks = [0], [bytes(32)]
    monkeypatch.setattr(
        "plimsoll_engine.core.execute.runner.Runner._sample_tokens", lambda *_: None
    )
    for number in range(3):
        keeper._sample_tokens(None, [], made)  # type: ignore[arg-type]
        assert [mask.nbytes for mask in keeper.masks] == [32] * (number + 1)


def test_several_faults_turn_one_object() -> None:
    class Base:
        def layers(self) -> list[str]:
            return ["sound"]

    class First(Base):
        def layers(self) -> list[str]:
            return [*super().layers(), "first"]

    class Second(Base):
        def layers(self) -> list[str]:
            return [*super().layers(), "second"]

    one = Base()
    assert replace_methods(one, First) is one
    replace_methods(one, Second)
    assert one.layers() == ["sound", "first", "second"]
    assert Base().layers() == ["sound"]
