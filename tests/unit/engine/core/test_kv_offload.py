"""KV blocks move to host memory ahead of their eviction, and come back with what was in them.

Tests ``kvcache/offload.py`` and ``kvcache/block_copies.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.kvcache import offload as module
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_faults.defects.offload import StuckCopier, UnpolledOffload


@pytest.fixture
def engine(make_engine: Any) -> EngineCore:
    """16 blocks of 4 tokens on the device, 64 on the host."""
    found: EngineCore = make_engine(num_blocks=16, block_size=4, budget=16)
    assert found.runner.kv is not None
    block_bytes = found.runner.kv.nbytes // 16
    found.scheduler.offload = Offload.create(found.pool, found.runner.kv, 64 * block_bytes + 1)
    return found


def offload_of(engine: EngineCore) -> Offload:
    assert engine.scheduler.offload is not None
    return engine.scheduler.offload


def findings(engine: EngineCore) -> list[str]:
    return [finding.rule for finding in run_audit(engine, Ledger())[2]]


def run_idle(engine: EngineCore, polls: int = 4) -> None:
    for _ in range(polls):
        engine.poll(is_idle=True)
        assert findings(engine) == []


def prompts() -> list[list[int]]:
    return [[number * 7 % 50 + k for k in range(21)] for number in range(8)]


def test_evicted_prefixes_come_back_with_the_same_text(
    engine: EngineCore, make_engine: Any, helpers: Any
) -> None:
    plain = make_engine(num_blocks=64)
    for number, prompt in enumerate(prompts()):
        plain.submit(helpers.submit(f"r{number}", prompt, 6))
    expected = helpers.finish(plain)
    for turn in range(2):
        for number, prompt in enumerate(prompts()):
            engine.submit(helpers.submit(f"r{number}", prompt, 6))
            assert helpers.finish(engine) == {f"r{number}": expected[f"r{number}"]}
            run_idle(engine)
        assert (offload_of(engine).loaded_total > 0) == bool(turn)
    # 8 prompts of 5 full blocks never fit into the 16 of the device.
    assert engine.scheduler.prefix_hit_tokens_total > 40


def test_blocks_leave_and_return_bit_for_bit(engine: EngineCore) -> None:
    offload, kv = offload_of(engine), engine.runner.kv
    assert kv is not None
    kv.copy_(torch.randn_like(kv))
    blocks = engine.pool.allocate(3)
    assert blocks is not None
    for block in blocks:
        engine.pool.register(block, bytes([block]))
    before = {bytes([b]): kv[:, :, b * 4 : b * 4 + 4].clone() for b in blocks}
    engine.pool.release(blocks)
    while len(offload.stored) < 3 or offload.transfers:
        offload.poll()
    engine.pool.reset_prefix_cache()
    assert engine.pool.num_cached == 0
    kv.zero_()
    assert offload.fetch(list(before)) is True
    assert offload.fetch(list(before)) is True  # under way: wait for the same transfer
    assert len(offload.transfers) == 1
    offload.wait_for_transfers(1.0)
    while len(back := engine.pool.find_cached_prefix(list(before))) < 3:
        assert offload.fetch(list(before))
        offload.wait_for_transfers(1.0)
    for block, tensor in zip(back, before.values(), strict=True):
        assert torch.equal(kv[:, :, block * 4 : block * 4 + 4], tensor)
    del kv  # the audit would find it
    assert findings(engine) == []


def test_a_block_that_is_written_while_it_is_copied_is_not_kept(engine: EngineCore) -> None:
    offload = offload_of(engine)
    blocks = engine.pool.allocate(1)
    assert blocks is not None
    engine.pool.register(blocks[0], b"old")
    engine.pool.release(blocks)
    offload.poll()
    assert len(offload.transfers) == 1
    assert offload.fetch([b"old"]) is False
    whole = engine.pool.allocate(16)
    assert whole is not None
    engine.pool.release(whole)
    offload.poll()
    assert b"old" not in offload.stored
    assert (offload.stored_total, findings(engine)) == (0, [])


def fill(engine: EngineCore, helpers: Any) -> None:
    for number, prompt in enumerate(prompts()):
        engine.submit(helpers.submit(f"f{number}", prompt, 6))
        helpers.finish(engine)
    engine.poll(is_idle=True)


def leave_one_under_way(engine: EngineCore, helpers: Any) -> None:
    """Idle, with a transfer that the last step began: its request was given up at once."""
    fill(engine, helpers)
    for number in range(20):
        engine.submit(helpers.submit(f"g{number}", [number + 3] * 21, 6))
        engine.step()
        engine.abort(f"g{number}")
        helpers.finish(engine)
        if engine.is_transferring:
            return
    raise AssertionError("no step began a transfer")


def test_an_abort_while_its_blocks_come_in_leaves_nothing(engine: EngineCore, helpers: Any) -> None:
    fill(engine, helpers)
    offload_of(engine).wait_for_transfers(1.0)
    offload_of(engine).poll = lambda is_idle=False: None  # type: ignore[method-assign]
    engine.submit(helpers.submit("a", prompts()[0], 6))
    engine.step()
    assert [t.copy_to_host for t in offload_of(engine).transfers] == [False]
    assert findings(engine) == []
    assert engine.abort("a")
    assert findings(engine) == []
    del offload_of(engine).poll
    run_idle(engine)
    assert (engine.pool.num_used, offload_of(engine).transfers) == (0, [])


def test_a_request_that_needs_the_whole_pool_does_not_wait_for_ever(
    engine: EngineCore, helpers: Any
) -> None:
    fill(engine, helpers)
    engine.submit(helpers.submit("whole", list(range(40)), 24))
    assert len(helpers.finish(engine)["whole"]) == 24
    run_idle(engine)


def test_an_idle_engine_that_never_polls_is_found(
    engine: EngineCore, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real bug put back: transfers are looked after in steps alone."""
    sound = offload_of(engine)
    engine.scheduler.offload = UnpolledOffload.from_offload(sound)
    leave_one_under_way(engine, helpers)
    monkeypatch.setattr(module, "STALE_TRANSFER_S", -1.0)
    for _ in range(3):
        engine.poll(is_idle=True)
    assert engine.is_transferring
    assert findings(engine) == ["transfers_end"]
    sound.transfers = offload_of(engine).transfers
    engine.scheduler.offload = sound
    for _ in range(9):
        engine.poll(is_idle=True)
    assert not engine.is_transferring


def test_a_reset_says_that_it_could_not(
    engine: EngineCore, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(engine, helpers)
    assert engine.reset_prefix_cache() is True
    assert engine.pool.num_free == 16
    assert len(offload_of(engine).stored) == 0
    monkeypatch.setattr("plimsoll_engine.core.engine_core.RESET_TRANSFER_TIMEOUT_S", 0.02)
    offload_of(engine).copies = StuckCopier(offload_of(engine).copies)
    fill(engine, helpers)
    assert engine.is_transferring
    assert engine.reset_prefix_cache() is False


def test_a_reset_that_does_not_wait_would_be_false_for_ever(
    engine: EngineCore, helpers: Any
) -> None:
    """The real bug put back: it asks whether nothing is under way, and looks after nothing."""
    engine.scheduler.offload = UnpolledOffload.from_offload(offload_of(engine))
    leave_one_under_way(engine, helpers)

    def reset() -> bool:
        engine.poll(is_idle=True)
        return not engine.is_transferring

    assert [reset() for _ in range(5)] == [False] * 5
    assert engine.reset_prefix_cache() is True


def test_too_few_bytes_for_a_block_are_refused(engine: EngineCore) -> None:
    assert engine.runner.kv is not None
    with pytest.raises(
        ValueError, match=r"--kv-offload-bytes must be at least .*, the size of one KV block, got 7"
    ):
        Offload.create(engine.pool, engine.runner.kv, 7)


def test_close_gives_every_block_back(engine: EngineCore, helpers: Any) -> None:
    fill(engine, helpers)
    offload = offload_of(engine)
    offload.close()
    offload.close()
    assert (offload.copies.nbytes, engine.pool.num_used, len(offload.stored)) == (0, 0, 0)
