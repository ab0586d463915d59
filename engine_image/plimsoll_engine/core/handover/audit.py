"""Validate the block tables of a handover message. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll_engine.kvcache.block_hashes import HASH_BYTES
from plimsoll_engine.messages.handover import (
    BlockTable,
    Handover,
    HandoverOutcome,
    HandoverRefusedError,
    PoolLayout,
)

# These fields of PoolLayout differ only between different models.
MODEL_FIELDS = ("weights", "dtype", "shape")


def check_handover(handover: Handover, layout: PoolLayout, max_num_seqs: int) -> None:
    """Raise :class:`HandoverRefusedError` unless ``handover`` fits a pool with ``layout``."""
    for name in PoolLayout.__struct_fields__:
        previous, own = getattr(handover.layout, name), getattr(layout, name)
        if previous != own:
            outcome = (
                HandoverOutcome.OTHER_MODEL if name in MODEL_FIELDS else HandoverOutcome.OTHER_POOL
            )
            raise HandoverRefusedError(
                outcome,
                f"the previous worker's {name} was {_format_value(previous)}, but this worker's is"
                f" {_format_value(own)}",
            )
    for problem in find_problems(handover, max_num_seqs):
        raise HandoverRefusedError(HandoverOutcome.BAD_TABLES, problem)


def find_problems(handover: Handover, max_num_seqs: int) -> Iterator[str]:
    """Yield a message for each error in the block tables of ``handover``."""
    layout, tables = handover.layout, handover.tables
    if len(tables) > max_num_seqs:
        yield f"the handover has {len(tables)} requests, but at most {max_num_seqs} can run"
    if len({table.request_id for table in tables}) != len(tables):
        yield "a request has more than one table"
    contents: dict[int, tuple[str | bytes, int]] = {}
    for table in tables:
        yield from _find_table_problems(table, layout)
        # A partial block belongs to one request, so its ID serves as the key.
        keys: list[str | bytes] = [*table.hashes, table.request_id]
        for block, content in zip(table.blocks, zip(keys, table.sums, strict=False), strict=False):
            if contents.setdefault(block, content) != content:
                yield (
                    f"two requests have different contents for block {block}; one of them is"
                    f" {table.request_id}"
                )
    num_references = sum(len(table.blocks) for table in tables)
    if (handover.used_blocks, handover.block_references) != (len(contents), num_references):
        yield (
            f"the previous worker counted {handover.used_blocks} blocks with "
            f"{handover.block_references} references, but"
            f" the tables have {len(contents)} blocks with {num_references} references"
        )


def _find_table_problems(table: BlockTable, layout: PoolLayout) -> Iterator[str]:
    size, subject = layout.block_size, f"request {table.request_id}"
    if table.computed < 1:
        yield f"{subject} has no computed tokens"
    num_blocks = -(-table.computed // size)
    if len(table.blocks) != num_blocks:
        yield f"{subject} has {len(table.blocks)} blocks, but its tokens need {num_blocks}"
    num_full_blocks = table.computed // size
    if len(table.hashes) != num_full_blocks:
        yield f"{subject} has {len(table.hashes)} hashes, but {num_full_blocks} full blocks"
    if len(table.sums) != len(table.blocks):
        yield f"{subject} has {len(table.sums)} checksums, but {len(table.blocks)} blocks"
    tail_bytes = HASH_BYTES if table.computed % size else 0
    if len(table.tail) != tail_bytes:
        yield (
            f"{subject} has a hash of {len(table.tail)} bytes for the last block, but needs"
            f" {tail_bytes}"
        )
    if any(len(key) != HASH_BYTES for key in table.hashes):
        yield f"{subject} has a hash whose length is not {HASH_BYTES} bytes"
    if table.blocks and max(table.blocks) >= layout.num_blocks:
        yield (
            f"{subject} has block {max(table.blocks)}, but the pool has {layout.num_blocks} blocks"
        )
    if len(set(table.blocks)) != len(table.blocks):
        yield f"{subject} has a block twice"


def _format_value(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
