"""Capacity that is lost: taken, and held by nobody who could still need it or give it back.

It is counted between steps, where every book must agree, so that load, preemption and a full prefix
cache cannot be mistaken for it. A sound engine pays for a sum over its running requests; blocks are
only gone through once that is not the pool's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.request import Request
from plimsoll_engine.kvcache.offload import STALE_S


def lost_blocks(engine: EngineCore) -> int:
    """Return KV blocks that are referenced, but by nothing that is waited for.

    That is a request that somebody waits for, or a transfer that is looked after.
    """
    pool, offload = engine.pool, engine.scheduler.offload
    fresh = [] if offload is None else offload.held_blocks(time.monotonic() - STALE_S)
    if engine.inheritance is not None:  # it ends by itself
        fresh += engine.inheritance.held_blocks()
    # Those that wait hold none; where a defect leaves them some, the blocks themselves are counted.
    running = _waited_for(engine, engine.scheduler.running)
    if pool.held == sum(len(request.block_ids) for request in running) + len(fresh):
        return 0
    waited_for = _waited_for(engine, engine.requests.values())
    named = set(chain(fresh, *(request.block_ids for request in waited_for)))
    return len(pool.references().keys() - named)


def lost_host_blocks(engine: EngineCore) -> int | None:
    """Return the host's KV blocks that are pinned by no transfer that is looked after.

    None without an offload.
    """
    offload = engine.scheduler.offload
    return None if offload is None else offload.lost_slots(time.monotonic() - STALE_S)


def lost_encoder_tokens(engine: EngineCore) -> int | None:
    """Return the tokens of the encoder cache's budget that nobody will use.

    They are of entries that no request holds which runs and is waited for, and of outputs of the
    runner that have no entry. None for a model without an encoder.
    """
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    if cache is None or outputs is None:
        return None
    running = {r.request_id for r in _waited_for(engine, engine.scheduler.running)}
    held = sum(e.tokens for e in cache.entries.values() if e.holders.isdisjoint(running))
    return held + outputs.tokens_beyond(cache.known())


def _waited_for(engine: EngineCore, requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.request_id not in engine.abandoned]
