"""Check block tables that another worker wrote. Pure.

What passes is a pool that could have come about in this worker: every block is there, and none is
shared but by requests whose tokens up to its end are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll_engine.kvcache.prefix_hashes import HASH_BYTES
from plimsoll_engine.messages.handover import Handover, HandoverRefused, Layout, Outcome, Table

MODEL_FIELDS = ("weights", "dtype", "shape")


def check(handover: Handover, layout: Layout, max_num_seqs: int) -> None:
    """Raise :class:`HandoverRefused` where ``handover`` cannot be of a pool of this ``layout``."""
    for name in Layout.__struct_fields__:
        theirs, ours = getattr(handover.layout, name), getattr(layout, name)
        if theirs != ours:
            other = Outcome.OTHER_MODEL if name in MODEL_FIELDS else Outcome.OTHER_POOL
            raise HandoverRefused(other, f"{name}: it was {_said(theirs)}, it is {_said(ours)}")
    for problem in problems(handover, max_num_seqs):
        raise HandoverRefused(Outcome.BAD_TABLES, problem)


def problems(handover: Handover, max_num_seqs: int) -> Iterator[str]:
    """Say what is wrong with the tables; nothing on sound ones."""
    layout, tables = handover.layout, handover.tables
    if len(tables) > max_num_seqs:
        yield f"{len(tables)} requests ran, the most is {max_num_seqs}"
    if len({table.request_id for table in tables}) != len(tables):
        yield "a request has two tables"
    meanings: dict[int, tuple[str | bytes, int]] = {}
    for table in tables:
        yield from _wrong_in(table, layout)
        # A block that is not full is the request's own, so its meaning is nobody else's.
        keys: list[str | bytes] = [*table.hashes, table.request_id]
        for block, meaning in zip(table.blocks, zip(keys, table.sums, strict=False), strict=False):
            if meanings.setdefault(block, meaning) != meaning:
                yield f"block {block} has two meanings, one of them in request {table.request_id}"
    held = sum(len(table.blocks) for table in tables)
    if (handover.used, handover.held) != (len(meanings), held):
        yield (
            f"{handover.used} blocks with {handover.held} references were counted, the tables name"
            f" {len(meanings)} with {held}"
        )


def _wrong_in(table: Table, layout: Layout) -> Iterator[str]:
    size, who = layout.block_size, f"request {table.request_id}"
    if table.computed < 1:
        yield f"{who} has no computed token"
    if len(table.blocks) != -(-table.computed // size):
        yield f"{who} has {len(table.blocks)} blocks for {table.computed} tokens"
    if len(table.hashes) != table.computed // size:
        yield f"{who} has {len(table.hashes)} hashes for {table.computed} tokens"
    if len(table.sums) != len(table.blocks):
        yield f"{who} has {len(table.sums)} sums for {len(table.blocks)} blocks"
    if len(table.tail) != (HASH_BYTES if table.computed % size else 0):
        yield f"{who}: the hash of its last block has {len(table.tail)} bytes"
    if any(len(key) != HASH_BYTES for key in table.hashes):
        yield f"{who} has a hash that is not of {HASH_BYTES} bytes"
    if table.blocks and max(table.blocks) >= layout.num_blocks:
        yield f"{who} has block {max(table.blocks)}, the pool has {layout.num_blocks}"
    if len(set(table.blocks)) != len(table.blocks):
        yield f"{who} has a block twice"


def _said(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
