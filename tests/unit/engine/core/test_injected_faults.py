"""Each fault that can be injected into a worker is the defect that it names.

Tests ``plimsoll_faults/inject.py``.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from plimsoll_api.admin import Role
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.grammar.grammars import GrammarCompiler, Vocabulary
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages import worker_ipc
from plimsoll_faults import inject
from plimsoll_faults.defects import DEFECTS, WorkerFaults, device, host
from plimsoll_faults.kinds import KINDS


def faults_in(engine: EngineCore, text: str, epoch: int = 1) -> WorkerFaults:
    return WorkerFaults(text, epoch, engine)


def serve(engine: EngineCore, faults: WorkerFaults, helpers: Any, count: int = 3) -> None:
    for number in range(count):
        engine.submit(helpers.submit(f"r{number}", [number + 1] * 9, 2))
        helpers.finish(engine)
        faults.after_step(1)


def rules_hit(engine: EngineCore) -> set[str]:
    return {finding.rule for finding in run_audit(engine, Ledger())[2]}


def test_every_kind_is_somewhere_and_says_where_it_shows() -> None:
    assert set(DEFECTS) == {kind for kind in KINDS if kind.process is Role.WORKER}
    for kind in KINDS:
        assert kind.owner, kind
        assert kind.segment, kind


def held_bytes(defect: Any) -> int:
    kept = defect.kept
    values = kept.values() if isinstance(kept, dict) else kept
    return sum(
        value.nbytes if hasattr(value, "nbytes") else memoryview(value).nbytes for value in values
    )


@pytest.mark.parametrize("name", ["device_dict", "pinned_buffers"])
def test_tensors_are_kept_for_each_request(name: str, make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    faults = faults_in(engine, f"{name}:bytes_per_request=64Ki")
    serve(engine, faults, helpers)
    assert held_bytes(faults.defects[0]) == 3 * 65536


@pytest.mark.parametrize("name", ["mmap_growth", "shared_growth"])
def test_mappings_stay(name: str, make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    faults = faults_in(engine, f"{name}:bytes_per_request=64Ki")
    serve(engine, faults, helpers)
    defect: Any = faults.defects[0]
    assert [len(mapping) for mapping in defect.mappings.kept] == [65536] * 3


def test_mappings_grow_with_time(make_engine: Any) -> None:
    faults = faults_in(make_engine(), "mmap_growth:bytes_per_s=1Mi")
    faults._last_tick -= 2
    faults.tick()
    defect: Any = faults.defects[0]
    assert len(defect.mappings.kept[0]) >= 2 << 20


def test_lists_grammars_exceptions_and_method_caches_keep(
    make_engine: Any, helpers: Any, tiny_checkpoint: Any
) -> None:
    engine = make_engine(grammars=GrammarCompiler(Vocabulary.load(tiny_checkpoint)))
    host.Rotary.compute_angle.cache_clear()
    faults = faults_in(
        engine, "append_list;grammar_cache_growth;stored_exception;method_cache; kept_kv"
    )
    pool = engine.runner.kv
    serve(engine, faults, helpers)
    by_name: dict[str, Any] = dict(zip(faults.names, faults.defects, strict=True))
    assert [len(kept) for kept in by_name["append_list"].kept] == [2048] * 3
    assert len(by_name["grammar_cache_growth"].kept) == 4
    assert host.Rotary.compute_angle.cache_info().currsize == 3
    host.Rotary.compute_angle.cache_clear()
    frames = [error.__traceback__.tb_next for error in by_name["stored_exception"].kept]
    assert [frame.tb_frame.f_locals["hidden"].nbytes for frame in frames] == [1 << 20] * 3
    assert device.GLOBAL_TENSORS.pop("layers") is pool


def test_slow_steps_take_time_and_keep_nothing(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    faults = faults_in(engine, "slow_steps:wait_ms=30")
    began = time.monotonic()
    faults.after_step(0)
    assert time.monotonic() - began >= 0.03
    serve(engine, faults, helpers)
    assert rules_hit(engine) == set()


def test_a_cyclic_request_outlives_its_end(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    faults = faults_in(engine, "request_cycle:payload_bytes=1Ki,freeze_every=0")
    gc.disable()
    try:
        serve(engine, faults, helpers)
        assert rules_hit(engine) == {"released_requests_die"}
        gc.collect()
        assert rules_hit(engine) == set()
    finally:
        gc.enable()


def test_a_slice_of_a_prompt_keeps_its_whole_step(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    tokens = [helpers.submit(f"r{n}", [n + 1] * 30, 4) for n in range(3)]
    plain = make_engine()
    for asked in tokens:
        plain.submit(asked)
    expected = helpers.finish(plain)
    defect: Any = faults_in(engine, "slice_kept").defects[0]
    for asked in tokens:
        engine.submit(asked)
    assert helpers.finish(engine) == expected
    # Three prompts of 30 in steps of at most 64 rows: two, then the third beside two that decode.
    rows = [kept.untyped_storage().nbytes() // kept.nbytes for kept in defect.kept]
    assert [kept.shape[0] for kept in defect.kept] == [1] * len(rows)
    assert rows == [60, 32]
    defect.kept.clear()
    long = make_engine(budget=200)  # the last layer computes one row of it
    long.runner.model = engine.runner.model
    long.submit(helpers.submit("long", [7] * 180, 1))
    helpers.finish(long)
    assert [kept.untyped_storage().nbytes() // kept.nbytes for kept in defect.kept] == [180]
    del engine.runner.model.forward  # the model is every test's


def test_pinned_items_hold_blocks_at_idle(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    faults = faults_in(engine, "pinned_items:blocks_per_request=2")
    serve(engine, faults, helpers)
    assert engine.pool.num_used == 6
    assert rules_hit(engine) == {"kv_references_match", "idle_holds_no_block"}


def test_the_abort_of_the_other_choices_is_lost(make_engine: Any) -> None:
    faults = faults_in(make_engine(), "abort_choices")
    assert not faults.should_drop(worker_ipc.Abort("cmpl-1-0"))
    assert faults.should_drop(worker_ipc.Abort("cmpl-1-1"))
    assert not faults.should_drop(worker_ipc.Trim("cmpl-1-1"))


NEEDS_CUDA = "a CUDA device: start the engine with --device cuda"
NEEDS_GRAMMARS = (
    "structured output, which is not available: grammar: this model's tokenizer does not"
)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("device_raw", "a CUDA device"),
        ("encoder_freed_early", "a model with an encoder"),
        ("encoder_budget_held", "a model with an encoder"),
        ("media_kept", "a model with an encoder"),
        ("grammar_cache_growth", NEEDS_GRAMMARS),
        ("cache_fills", NEEDS_GRAMMARS),
        ("lora_residue", "--enable-lora"),
        ("offload_pinned", "--kv-offload-bytes"),
        ("ipc_unreleased", NEEDS_CUDA),
        ("graph_per_key", NEEDS_CUDA),
        ("failed_capture", NEEDS_CUDA),
        ("grammar_masks", NEEDS_CUDA),
        ("collective_scratch", NEEDS_CUDA),
    ],
)
def test_a_fault_that_cannot_be_here_is_refused(text: str, needs: str, make_engine: Any) -> None:
    with pytest.raises(
        inject.InjectError, match=f"the fault {text} in PLIMSOLL_INJECT needs {needs}"
    ):
        faults_in(make_engine(), text)


def test_later_epochs_are_healthy(make_engine: Any) -> None:
    engine = make_engine()
    assert faults_in(engine, "append_list", epoch=2).defects == []
    assert faults_in(engine, "append_list:epochs=all", epoch=2).names == ["append_list"]
    assert faults_in(engine, "tokenizer_cache").defects == []
