"""Hand over the KV blocks of running requests to the next worker in a planned restart.

The handover message has a block table for each request: its blocks, the hashes of its tokens, and
the checksums of the blocks.
"""

from __future__ import annotations

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.kvcache.block_hashes import extend_block_hashes, hash_tail
from plimsoll_engine.messages import handover as messages
from plimsoll_engine.messages.handover import BlockTable, Handover, PoolLayout


def export_tables(engine: EngineCore, layout: PoolLayout) -> bytes:
    """Return the handover message with the block tables of the requests of ``engine``.

    No step may be in progress. Raises HandoverRefusedError if the message would be too large.
    """
    exported = [request for request in engine.requests.values() if _can_export(request, engine)]
    exported.sort(key=lambda request: (request.place is None, request.place))
    del exported[engine.scheduler.max_num_seqs :]
    named = {request.request_id: _list_blocks(request, layout.block_size) for request in exported}
    blocks = sorted({block for table in named.values() for block in table})
    sums = dict(zip(blocks, engine.runner.compute_block_sums(blocks), strict=True))
    tables = []
    for request in exported:
        extend_block_hashes(request, layout.block_size)  # with the newest token
        full = request.computed // layout.block_size
        own = named[request.request_id]
        tables.append(
            BlockTable(
                request.request_id,
                request.computed,
                own,
                request.block_hashes[:full],
                hash_tail(request, request.computed, layout.block_size),
                [sums[block] for block in own],
                request.started_at,
                request.cached_tokens,
            )
        )
    held = sum(len(table.blocks) for table in tables)
    return messages.encode_handover(Handover(layout, tables, len(blocks), held))


def _can_export(request: Request, engine: EngineCore) -> bool:
    # The host must know all tokens of ``request``, and a client must wait for them.
    known = request.in_flight.is_empty
    return known and request.computed > 0 and request.request_id not in engine.abandoned


def _list_blocks(request: Request, block_size: int) -> list[int]:
    return request.block_ids[: -(-request.computed // block_size)]
