"""Count lost capacity: memory that nothing needs and nothing will release.

Lost capacity is counted between steps, when all counts must agree. Load, preemption and a full
prefix cache therefore do not count as loss. Usually, a sum over the running requests suffices.
Individual blocks are examined only if that sum differs from the pool's count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.kvcache.offload import STALE_TRANSFER_S


def count_lost_blocks(engine: EngineCore) -> int:
    """Return the number of lost KV blocks.

    A block is lost if it has references, but none of them is from a request with a connected
    client, a transfer in progress or an inherited block table. Stuck transfers are not in progress.
    """
    pool, offload = engine.pool, engine.scheduler.offload
    live_blocks = (
        [] if offload is None else offload.list_held_blocks(time.monotonic() - STALE_TRANSFER_S)
    )
    if engine.inheritance is not None:  # it will release the blocks that it holds
        live_blocks += engine.inheritance.list_held_blocks()
    # Waiting requests hold no blocks. If they do because of a bug, blocks are examined below.
    running = _select_requests_with_client(engine, engine.scheduler.running)
    if pool.num_references == sum(len(request.block_ids) for request in running) + len(live_blocks):
        return 0
    waited_for = _select_requests_with_client(engine, engine.requests.values())
    needed = set(chain(live_blocks, *(request.block_ids for request in waited_for)))
    return len(pool.count_references().keys() - needed)


def count_lost_host_blocks(engine: EngineCore) -> int | None:
    """Return the number of pinned host KV blocks without a transfer in progress.

    Stuck transfers are not in progress. Return None if KV offload is disabled.
    """
    offload = engine.scheduler.offload
    return (
        None if offload is None else offload.count_lost_slots(time.monotonic() - STALE_TRANSFER_S)
    )


def count_lost_encoder_tokens(engine: EngineCore) -> int | None:
    """Return the number of lost tokens in the encoder cache; None if the model has no encoder.

    A cache entry is lost if no running request with a connected client needs it. An encoder output
    in the runner is lost if the cache has no entry for it.
    """
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    if cache is None or outputs is None:
        return None
    running = {r.request_id for r in _select_requests_with_client(engine, engine.scheduler.running)}
    held = sum(e.tokens for e in cache.entries.values() if e.holders.isdisjoint(running))
    return held + outputs.count_unknown_tokens(cache.list_known_keys())


def _select_requests_with_client(engine: EngineCore, requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.request_id not in engine.abandoned]
