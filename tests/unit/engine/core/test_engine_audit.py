"""Each audit rule finds the disagreement that it is for, and nothing on a sound engine.

Tests ``memory/audit.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from plimsoll_api.admin import MemoryKind, Role
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.memory.audit import IDLE_RULES, RULES, run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.memory.trim import trim
from plimsoll_engine.process.host_memory import (
    PythonMemoryEstimator,
    measure_process_memory,
    read_malloc_bytes,
)
from plimsoll_engine.process.owners import Owner


def rules_hit(engine: EngineCore, ledger: Ledger | None = None) -> set[str]:
    return {finding.rule for finding in run_audit(engine, ledger or Ledger())[2]}


def test_a_sound_engine_has_no_findings_at_work_and_at_idle(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    for name in "abc":
        engine.submit(helpers.submit(name, [ord(name)] * 30, 20))
    own = ["kv_blocks_add_up", "prefix_cache_keys_equal"]
    always, at_idle = [[rule.__name__ for rule in rules] for rules in (RULES, IDLE_RULES)]
    for _ in range(2):
        engine.step()
        assert run_audit(engine, Ledger([engine])) == (False, own + always, [])
    helpers.finish(engine)
    assert run_audit(engine, Ledger([engine])) == (True, own + always + at_idle, [])


DAMAGE: list[tuple[Callable[[EngineCore], Any], set[str]]] = [
    (lambda e: e.pool._free.pop(), {"kv_blocks_add_up"}),
    (lambda e: e.pool.allocate(1), {"kv_references_match", "idle_holds_no_block"}),
    (lambda e: e.pool.prefix._order.update({b"ghost": None}), {"prefix_cache_keys_equal"}),
    (lambda e: e.scheduler.add(e.make_request(SUBMIT)), {"queues_match_requests"}),
    (lambda e: e.scheduler.waiting.computed.update(deleted=3), {"queues_match_requests"}),
]
SUBMIT: Any = None


@pytest.mark.parametrize(("damage", "rules"), DAMAGE)
def test_each_rule_finds_its_damage(
    damage: Callable[[EngineCore], Any], rules: set[str], make_engine: Any, helpers: Any
) -> None:
    global SUBMIT
    SUBMIT = helpers.submit("stray", [1, 2], 3)
    engine = make_engine()
    kept = damage(engine)
    found = rules_hit(engine)
    assert found == rules, kept


def owner(name: str, nbytes: int, bound: int | None) -> Owner:
    return Owner(name=name, kind=MemoryKind.HOST, nbytes=lambda: nbytes, bound=bound)


@dataclass
class Part:
    held: list[Owner]
    name: str = "part"

    def list_owners(self) -> list[Owner]:
        return self.held

    def close(self) -> None:
        self.held.clear()


def test_an_owner_outside_its_bound_is_found(make_engine: Any) -> None:
    part = Part([owner("cache", 11, 10), owner("unbounded", 1 << 40, None)])
    ledger = Ledger([part])
    idle, _, findings = run_audit(make_engine(), ledger)
    assert idle
    assert [f.detail for f in findings] == ["cache holds 11 bytes, which exceeds its bound of 10"]
    part.held.append(owner("cache", 0, None))
    with pytest.raises(ValueError, match="'cache' is registered twice"):
        ledger.list_entries()


def test_a_trim_flushes_the_cache_and_says_what_it_gave(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    engine.submit(helpers.submit("a", [5] * 40, 4))
    helpers.finish(engine)
    assert engine.pool.num_cached == 10
    cycle: list[Any] = [bytearray(8 << 20)]
    cycle.append(cycle)
    del cycle
    steps = {step.name: step for step in trim(engine, PythonMemoryEstimator())}
    assert list(steps) == [
        "prefix_cache_flush",
        "grammar_cache_flush",
        "gc_collect",
        "malloc_trim",
    ]
    flush, collect = steps["prefix_cache_flush"], steps["gc_collect"]
    assert (flush.before_bytes, flush.after_bytes) == (10 * 4 * 1024, 0)
    assert collect.before_bytes is not None
    assert collect.after_bytes is not None
    assert collect.before_bytes - collect.after_bytes >= 8 << 20
    assert engine.pool.num_free == engine.pool.num_blocks


def test_malloc_is_seen_from_inside() -> None:
    before, _ = read_malloc_bytes()
    payload = bytearray(32 << 20)
    after, _ = read_malloc_bytes()
    assert before is not None
    assert after is not None
    assert after - before >= len(payload)
    memory = measure_process_memory(Role.WORKER, PythonMemoryEstimator())
    assert memory.python_objects is not None
    assert memory.python_objects > 1 << 20
