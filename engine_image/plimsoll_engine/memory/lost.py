"""Count lost capacity: memory that nothing needs and nothing will release.

It is counted between steps, when all counts must agree, so load and a full cache are no loss.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.kvcache.offload import STALE_TRANSFER_S


def count_lost_blocks(engine: EngineCore) -> int:
    """Return the number of referenced KV blocks that nothing needs.

    Blocks of requests with a connected client, of transfers in progress and of inherited block
    tables are needed. Stuck transfers are not in progress.
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
    """Return the number of lost tokens in the encoder cache; None if the model has no encoder."""
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    if cache is None or outputs is None:
        return None
    running = {r.request_id for r in _select_requests_with_client(engine, engine.scheduler.running)}
    held = sum(e.tokens for e in cache.entries.values() if e.holders.isdisjoint(running))
    return held + outputs.count_unknown_tokens(cache.list_known_keys())


def _select_requests_with_client(engine: EngineCore, requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.request_id not in engine.abandoned]
