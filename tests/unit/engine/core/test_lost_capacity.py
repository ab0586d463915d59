"""What nobody holds is counted to the block; what load, preemption or transfers hold is not.

Tests ``memory/lost.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.offload import STALE_TRANSFER_S, Offload
from plimsoll_engine.memory.lost import count_lost_blocks, count_lost_encoder_tokens
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_faults.defects import WorkerFaults

BLOCKS, BLOCK, SLOTS = 12, 4, 40
Make = Callable[..., tuple[EngineCore, WorkerFaults]]


@pytest.fixture
def make(make_engine: Any) -> Make:
    """An engine of twelve blocks with an offload, and the faults of a text."""

    def make_one(text: str = "") -> tuple[EngineCore, WorkerFaults]:
        engine = sized(make_engine(num_blocks=BLOCKS, block_size=BLOCK, seqs=3, budget=16))
        return engine, WorkerFaults(text, 1, engine)

    return make_one


def sized(engine: EngineCore) -> EngineCore:
    kv = engine.runner.kv
    assert kv is not None
    size = SLOTS * (kv.nbytes // BLOCKS)
    engine.scheduler.offload = Offload.create(engine.pool, kv, size)
    return engine


# ---- lost


def test_each_pinned_block_is_lost_at_idle_and_under_load(make: Make, helpers: Any) -> None:
    engine, faults = make("pinned_items:blocks_per_request=1")
    for number in range(3):
        engine.submit(helpers.submit(f"r{number}", [number + 1] * 9, 2))
        helpers.finish(engine)
        faults.after_step(1)
        assert count_lost_blocks(engine) == number + 1
    engine.submit(helpers.submit("busy", [9] * 9, 8))
    engine.step()
    assert engine.pool.num_used == 3 + 3
    assert count_lost_blocks(engine) == 3


def test_a_lost_reference_to_a_block_that_is_in_use_costs_no_capacity(
    make: Make, helpers: Any
) -> None:
    engine, _ = make()
    engine.submit(helpers.submit("a", [1] * 9, 8))
    engine.step()
    engine.pool.add_references(engine.requests["a"].block_ids[:1])
    assert count_lost_blocks(engine) == 0
    helpers.finish(engine)
    assert count_lost_blocks(engine) == 1


def test_an_abandoned_transfer_is_lost_once_it_is_late(make: Make) -> None:
    engine, faults = make("offload_abandoned:blocks_per_abort=2")
    faults.should_drop(worker_ipc.Abort("a"))
    assert count_lost_blocks(engine) == 0
    offload = engine.scheduler.offload
    assert offload is not None
    offload.transfers[0].started -= STALE_TRANSFER_S
    assert count_lost_blocks(engine) == 2


def test_requests_that_nobody_waits_for_are_lost(make: Make, helpers: Any) -> None:
    engine, _ = make()
    prompt = [5] * 9  # two whole blocks that both share
    for name in ("kept", "left"):
        engine.submit(helpers.submit(name, prompt, 8))
        engine.step()
    engine.step()
    assert count_lost_blocks(engine) == 0
    engine.abandoned = frozenset({"left"})
    left, kept = engine.requests["left"].block_ids, engine.requests["kept"].block_ids
    assert count_lost_blocks(engine) == len(set(left) - set(kept)) > 0
    helpers.finish(engine)
    assert count_lost_blocks(engine) == 0


# ---- not lost

EVENT = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 30), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("idle")),
    st.tuples(st.just("reset")),
    st.tuples(st.just("leak"), st.booleans()),
)


@settings(max_examples=40, deadline=None)
@given(events=st.lists(EVENT, max_size=25))
def test_only_what_was_leaked_is_lost(events: list[tuple[Any, ...]], tiny_model: Any) -> None:
    """Full pools, preemptions, prefixes, transfers, aborts: the count is that of the leaks."""
    scheduler = Scheduler(BlockPool(BLOCKS, BLOCK), 3, 16, 64)
    engine = sized(EngineCore(Runner(tiny_model, BLOCKS, BLOCK), scheduler))
    leaked: list[int] = []

    def check() -> None:
        named = {b for request in engine.requests.values() for b in request.block_ids}
        assert scheduler.offload is not None
        named.update(scheduler.offload.list_held_blocks())
        assert count_lost_blocks(engine) == len(set(leaked) - named)

    try:
        for number, (kind, *rest) in enumerate(events):
            match kind:
                case "submit":
                    family, length, new = rest
                    prompt = [family * 8 + place % 7 for place in range(length)]
                    engine.submit(Submit(str(number), prompt, Sampling(max_tokens=new)))
                case "abort":
                    engine.abort(next(iter(engine.requests), ""))
                case "step":
                    for _ in range(rest[0] * engine.has_work):
                        engine.step()
                        check()
                case "idle":
                    engine.poll(is_idle=True)
                case "reset":
                    engine.reset_prefix_cache()
                case "leak" if len(leaked) < 3:
                    leaked += leak(engine, used=rest[0])
            check()
    finally:
        engine.pool.release(leaked)
        engine.runner.model = None  # it is shared: close() would take its tensors
        engine.close()


def leak(engine: EngineCore, used: bool) -> list[int]:
    """One more reference, to a block that a request holds or to a free one."""
    if not used:
        return engine.pool.allocate(1) or []
    held = [b for request in engine.requests.values() for b in request.block_ids[:1]][:1]
    engine.pool.add_references(held)
    return held


def test_a_model_without_an_encoder_says_nothing(make: Make) -> None:
    assert count_lost_encoder_tokens(make()[0]) is None
