"""Audit rules that must hold between two steps of the engine.

They compare several memory owners, and repair nothing. Each owner checks its own memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

from plimsoll_api.admin import AuditFinding
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.process.rules import find_method_caches, freeze_counter

# Returns a message for each violation. The function's name names the rule in findings.
Rule = Callable[[EngineCore, Ledger], list[str]]


def kv_references_match(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that a block has as many references as block tables and transfers contain it."""
    owned = Counter(block for request in engine.requests.values() for block in request.block_ids)
    if engine.inheritance is not None:
        owned.update(engine.inheritance.list_held_blocks())
    if engine.scheduler.offload is not None:
        owned.update(engine.scheduler.offload.list_held_blocks())
    counted = engine.pool.count_references()
    if engine.pool.num_references != sum(counted.values()):
        return [
            f"the blocks have {sum(counted.values())} references in total, but the pool counted"
            f" {engine.pool.num_references}"
        ]
    wrong = [block for block in owned.keys() | counted if owned[block] != counted.get(block, 0)]
    if not wrong:
        return []
    block = min(wrong)
    return [
        f"{len(wrong)} blocks have a wrong number of references; block {block} has"
        f" {counted.get(block, 0)}, but {owned[block]} block tables and transfers contain it"
    ]


def queues_match_requests(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that each request is in exactly one queue or waits for a grammar."""
    scheduler = engine.scheduler
    queued = Counter(r.request_id for r in [*scheduler.running, *scheduler.waiting])
    queued.update(engine.grammars)
    if queued == Counter(engine.requests.keys()):
        return scheduler.waiting.find_problems()
    return [f"the queues have {queued.total()} requests, but the engine has {len(engine.requests)}"]


def released_requests_die(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that reference counting has freed all requests that have ended."""
    known = set(map(id, engine.requests.values()))
    kept = [request.request_id for request in engine.live if id(request) not in known]
    if not kept:
        return []
    return [f"{len(kept)} requests have ended but are still in memory, for example {min(kept)}"]


def ledger_within_bounds(_: EngineCore, ledger: Ledger) -> list[str]:
    """Check that no owner exceeds its declared bound."""
    return ledger.find_problems()


def idle_holds_no_encoder_output(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that an idle engine has no encoder outputs."""
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    if cache is None or outputs is None:
        return []
    held, known = len(outputs), len(cache.list_known_keys())
    return (
        [f"the engine is idle, but {held} encoder outputs are in memory, {known} in the cache"]
        if held or known
        else []
    )


def idle_holds_no_block(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that only transfers reference blocks in an idle engine."""
    offload = engine.scheduler.offload
    used = engine.pool.num_used - (0 if offload is None else len(set(offload.list_held_blocks())))
    return [f"{used} blocks are in use, but no request references them"] if used else []


def kv_pool_has_its_owners_alone(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that only the runner, its graphs and the KV offload reference the KV pool.

    Any other reference would keep the pool in memory after shutdown.
    """
    problems = []
    draft = None if engine.speculation is None else engine.speculation.draft_model
    pools: list[tuple[str, Forward, Offload | None]] = [
        ("KV pool", engine.runner, engine.scheduler.offload)
    ]
    if draft is not None:
        pools.append(("draft model's KV pool", draft.forward, None))
    for name, forward, offload in pools:
        parts = forward.graphs, forward.layers, offload
        owners = 1 + sum(part is not None for part in parts)
        kv, scales, unknown_to_others = forward.kv, forward.kv_scales, object()
        # Each object is referenced by one local variable here, and the pool also by its owners.
        known = owners + sys.getrefcount(unknown_to_others)
        others = 0 if kv is None else sys.getrefcount(kv) - known
        others += 0 if scales is None else sys.getrefcount(scales) - known
        if others:
            problems.append(f"{others} references to the {name} have no known owner")
    return problems


def nothing_is_frozen_again(_: EngineCore, __: Ledger) -> list[str]:
    """Check that only objects from the startup are excluded from garbage collection."""
    return freeze_counter.find_problems()


def methods_cache_no_instances(_: EngineCore, __: Ledger) -> list[str]:
    """Check that no ``lru_cache`` on a method keeps instances of its class alive."""
    return find_method_caches()


RULES: tuple[Rule, ...] = (
    kv_references_match,
    queues_match_requests,
    released_requests_die,
    nothing_is_frozen_again,
    methods_cache_no_instances,
    ledger_within_bounds,
)
IDLE_RULES: tuple[Rule, ...] = (
    idle_holds_no_block,
    idle_holds_no_encoder_output,
    kv_pool_has_its_owners_alone,
)


def run_audit(engine: EngineCore, ledger: Ledger) -> tuple[bool, list[str], list[AuditFinding]]:
    """Return whether the engine is idle, the names of the checked rules, and their findings."""
    idle = not engine.has_work
    checks = {name: check for owner in engine.list_owners() for name, check in owner.checks.items()}
    rules = RULES + IDLE_RULES if idle else RULES
    checks |= {rule.__name__: partial(rule, engine, ledger) for rule in rules}
    findings = [AuditFinding(name, detail) for name, check in checks.items() for detail in check()]
    return idle, list(checks), findings
