"""Every ledger against every other: what must hold between two steps, by name.

The rules of an idle engine are stricter: nothing may be left of requests that ended. A rule never
repairs; it only says what it found.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from plimsoll_api.admin import AuditFinding
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.forward import Forward
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.process.rules import frozen, method_cache_problems

Rule = Callable[[EngineCore, Ledger], list[str]]


def kv_blocks_add_up(engine: EngineCore, _: Ledger) -> list[str]:
    """Free, used and cached blocks are together the pool."""
    return engine.pool.problems()


def kv_references_match(engine: EngineCore, _: Ledger) -> list[str]:
    """Each block is referenced as often as block tables and transfers name it."""
    named = Counter(block for request in engine.requests.values() for block in request.block_ids)
    if engine.inheritance is not None:
        named.update(engine.inheritance.held_blocks())
    if engine.scheduler.offload is not None:
        named.update(engine.scheduler.offload.held_blocks())
    counted = engine.pool.references()
    if engine.pool.held != sum(counted.values()):
        return [f"{sum(counted.values())} references, {engine.pool.held} are counted"]
    wrong = [block for block in named.keys() | counted if named[block] != counted.get(block, 0)]
    if not wrong:
        return []
    block = min(wrong)
    return [
        f"{len(wrong)} blocks differ; block {block} has {counted.get(block, 0)} references and is"
        f" in {named[block]} block tables and transfers"
    ]


def prefix_cache_keys_equal(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that the prefix cache's order and data have the same keys."""
    return engine.pool.prefix.problems()


def queues_match_requests(engine: EngineCore, _: Ledger) -> list[str]:
    """Each request is in exactly one queue or compiled for, and nothing else is."""
    scheduler = engine.scheduler
    queued = Counter(r.request_id for r in [*scheduler.running, *scheduler.waiting])
    queued.update(engine.grammars)
    if queued == Counter(engine.requests.keys()):
        return scheduler.waiting.problems()
    return [f"{queued.total()} requests are queued, {len(engine.requests)} are known"]


def released_requests_die(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that a request that ended is dead, by reference counting alone."""
    known = set(map(id, engine.requests.values()))
    kept = [request.request_id for request in engine.live if id(request) not in known]
    if not kept:
        return []
    return [f"{len(kept)} requests ended and are still in memory, for example {min(kept)}"]


def adapters_are_held(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that an adapter that has memory is loaded or used by a request."""
    if (adapters := engine.runner.adapters) is None:
        return []
    return adapters.problems([r.adapter for r in engine.requests.values() if r.adapter is not None])


def ledger_within_bounds(_: EngineCore, ledger: Ledger) -> list[str]:
    """No owner holds more than it declared."""
    return ledger.problems()


def encoder_outputs_are_known(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that the scheduler's ledger knows all of the runner's encoder outputs."""
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    if cache is None or outputs is None:
        return []
    found = cache.problems()
    if lost := outputs.keys() - cache.known():
        found.append(f"{len(lost)} encoder outputs are in the runner and in no ledger")
    if dead := cache.holders() - {request.request_id for request in engine.scheduler.running}:
        found.append(f"{len(dead)} requests that do not run hold encoder outputs: {min(dead)}")
    return found


def receiver_cache_adds_up(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that the receiver cache counts the bytes that it holds."""
    return engine.receiver.problems()


def idle_holds_no_encoder_output(engine: EngineCore, _: Ledger) -> list[str]:
    """At idle neither the runner nor the scheduler's ledger has an encoder output."""
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    if cache is None or outputs is None:
        return []
    held, known = len(outputs), len(cache.known())
    return [f"{held} encoder outputs, {known} in the ledger"] if held or known else []


def idle_holds_no_block(engine: EngineCore, _: Ledger) -> list[str]:
    """At idle no block is referenced but by a transfer under way."""
    offload = engine.scheduler.offload
    used = engine.pool.used - (0 if offload is None else len(set(offload.held_blocks())))
    return [f"{used} blocks are referenced by no request"] if used else []


def kv_pool_has_its_owners_alone(engine: EngineCore, _: Ledger) -> list[str]:
    """Check that the KV pool belongs to the runner, its graphs and the offload alone.

    A registry or a stored frame that refers to it as well would keep it beyond the engine's
    shutdown. The same holds of a draft model's pool.
    """
    found = []
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
        # Each has a name here; the pool has its owners on top.
        known = owners + sys.getrefcount(unknown_to_others)
        others = 0 if kv is None else sys.getrefcount(kv) - known
        others += 0 if scales is None else sys.getrefcount(scales) - known
        if others:
            found.append(f"{others} references to the {name} have no holder")
    return found


def nothing_is_frozen_again(_: EngineCore, __: Ledger) -> list[str]:
    """Check that what was made since the start is within the collector's reach."""
    return frozen.problems()


def methods_cache_no_instances(_: EngineCore, __: Ledger) -> list[str]:
    """No ``lru_cache`` on a method holds instances for its class."""
    return method_cache_problems()


def offload_adds_up(engine: EngineCore, _: Ledger) -> list[str]:
    """Each host block is free or stored under one key, and pinned only while in transfer."""
    offload = engine.scheduler.offload
    return [] if offload is None else offload.problems()


def transfers_end(engine: EngineCore, _: Ledger) -> list[str]:
    """No KV transfer is left behind: an idle engine looks after them as a busy one does."""
    offload = engine.scheduler.offload
    if offload is None or not (ages := offload.stale()):
        return []
    return [f"{len(ages)} KV transfers are not looked after, the oldest for {max(ages):.0f} s"]


ALWAYS: tuple[Rule, ...] = (
    kv_blocks_add_up,
    kv_references_match,
    prefix_cache_keys_equal,
    queues_match_requests,
    released_requests_die,
    offload_adds_up,
    transfers_end,
    encoder_outputs_are_known,
    receiver_cache_adds_up,
    adapters_are_held,
    nothing_is_frozen_again,
    methods_cache_no_instances,
    ledger_within_bounds,
)
AT_IDLE: tuple[Rule, ...] = (
    idle_holds_no_block,
    idle_holds_no_encoder_output,
    kv_pool_has_its_owners_alone,
)


def audit(engine: EngineCore, ledger: Ledger) -> tuple[bool, list[str], list[AuditFinding]]:
    """(idle, the rules that were held, what they found)."""
    idle = not engine.has_work
    rules = ALWAYS + AT_IDLE if idle else ALWAYS
    findings = [
        AuditFinding(rule.__name__, detail) for rule in rules for detail in rule(engine, ledger)
    ]
    return idle, [rule.__name__ for rule in rules], findings
