"""Lost capacity: memory that is in use, although nothing needs it or will release it.

Lost capacity is counted between steps, when all counts must agree, so that load, preemption and a
full prefix cache are not counted. In a healthy engine, this takes only a sum over the running
requests. Blocks are examined only if that sum differs from the pool's count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.kvcache.offload import STALE_S


def count_lost_blocks(engine: EngineCore) -> int:
    """Return the number of lost KV blocks.

    A lost block is referenced, but neither by a request with a client nor by a live transfer.
    """
    pool, offload = engine.pool, engine.scheduler.offload
    live_blocks = [] if offload is None else offload.list_held_blocks(time.monotonic() - STALE_S)
    if engine.inheritance is not None:  # it will release the blocks that it holds
        live_blocks += engine.inheritance.list_held_blocks()
    # Waiting requests hold no blocks. If they do because of a bug, blocks are examined below.
    running = _select_with_client(engine, engine.scheduler.running)
    if pool.held == sum(len(request.block_ids) for request in running) + len(live_blocks):
        return 0
    waited_for = _select_with_client(engine, engine.requests.values())
    needed = set(chain(live_blocks, *(request.block_ids for request in waited_for)))
    return len(pool.count_references().keys() - needed)


def count_lost_host_blocks(engine: EngineCore) -> int | None:
    """Return the number of host KV blocks that are pinned without a live transfer.

    Return None if KV offload is disabled.
    """
    offload = engine.scheduler.offload
    return None if offload is None else offload.count_lost_slots(time.monotonic() - STALE_S)


def count_lost_encoder_tokens(engine: EngineCore) -> int | None:
    """Return the number of lost tokens in the encoder cache.

    A token is lost if no running request with a client needs its entry, or if the runner has its
    output without an entry in the cache. Return None if the model has no encoder.
    """
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    if cache is None or outputs is None:
        return None
    running = {r.request_id for r in _select_with_client(engine, engine.scheduler.running)}
    held = sum(e.tokens for e in cache.entries.values() if e.holders.isdisjoint(running))
    return held + outputs.count_unknown_tokens(cache.list_known_keys())


def _select_with_client(engine: EngineCore, requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.request_id not in engine.abandoned]
