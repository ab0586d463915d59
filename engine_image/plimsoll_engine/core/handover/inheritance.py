"""Inherit the KV blocks of the previous worker's requests in a planned restart.

A table is kept until the frontend submits its request again. The request gets the table only if the
blocks were computed for the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.handover import audit
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.kvcache.block_hashes import extend_block_hashes, hash_tail
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages import handover as messages
from plimsoll_engine.messages.handover import (
    BlockTable,
    HandoverOutcome,
    HandoverRefusedError,
    PoolLayout,
)

# Unclaimed tables are then released. The time begins with the worker's first step, because a busy
# machine can delay the worker's start.
CLAIM_TIMEOUT_S = 10.0


def validate_tables(
    data: bytes, layout: PoolLayout, runner: Runner, max_num_seqs: int
) -> list[BlockTable]:
    """Return the tables in the handover message ``data``. Their tokens are not checked yet.

    Raises :class:`HandoverRefusedError` if any other check fails.
    """
    handover = messages.decode_handover(data)
    audit.check_handover(handover, layout, max_num_seqs)
    expected = {
        block: total
        for table in handover.tables
        for block, total in zip(table.blocks, table.sums, strict=True)
    }
    blocks = sorted(expected)
    changed = [
        block
        for block, total in zip(blocks, runner.compute_block_sums(blocks), strict=True)
        if expected[block] != total
    ]
    if changed:
        raise HandoverRefusedError(
            HandoverOutcome.BAD_CONTENTS,
            f"{len(changed)} of {len(blocks)} KV blocks were overwritten during the handover, for"
            f" example block {changed[0]}",
        )
    return handover.tables


class Inheritance:
    """Inherited tables that no request has claimed yet.

    Each table holds a reference to each of its blocks in ``pool``.
    """

    def __init__(self, tables: Sequence[BlockTable], pool: BlockPool) -> None:
        self._tables = {table.request_id: table for table in tables}
        self._pool = pool
        # Time of the first call of release_expired_tables().
        self._since: float | None = None
        self.adopted: list[str] = []
        # Reason why a request did not get its table, by request ID.
        self.refused: dict[str, str] = {}

    def release_expired_tables(self) -> None:
        """Release unclaimed tables after :data:`CLAIM_TIMEOUT_S`. Call this between steps."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since > CLAIM_TIMEOUT_S:
            reason = f"the request did not arrive within {CLAIM_TIMEOUT_S:g} s"
            self.refused |= dict.fromkeys(self._tables, reason)
            self.release_tables()

    def list_held_blocks(self) -> list[int]:
        """Return the blocks of unclaimed tables, with one entry per reference."""
        return [block for table in self._tables.values() for block in table.blocks]

    def claim_table(self, request: Request) -> None:
        """Give ``request`` its inherited table, if its tokens are the same."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        if (reason := self._find_mismatch(table, request)) is not None:
            self._pool.release(table.blocks)
            self.refused[request.request_id] = reason
            return
        request.block_ids = list(table.blocks)
        request.computed = table.computed
        for block, key in zip(table.blocks, table.hashes, strict=False):
            self._pool.register(block, key)
        request.registered = len(table.hashes)
        request.started_at = table.started_at
        request.cached_tokens = table.cached_tokens
        self.adopted.append(request.request_id)

    def release_tables(self) -> None:
        """Release the blocks of all unclaimed tables."""
        for table in self._tables.values():
            self._pool.release(table.blocks)
        self._tables.clear()

    def _find_mismatch(self, table: BlockTable, request: Request) -> str | None:
        if request.has_unscored_rows:
            return "the log probabilities of the prompt are not computed yet"
        if len(request.token_ids) <= table.computed:
            return (
                f"the previous worker computed {table.computed} tokens,"
                f" but the request has {len(request.token_ids)}"
            )
        size = self._pool.block_size
        extend_block_hashes(request, size)
        if request.block_hashes[: len(table.hashes)] != table.hashes:
            return "the computed tokens differ from the request's tokens"
        if hash_tail(request, table.computed, size) != table.tail:
            return "the computed tokens in the last block differ from the request's tokens"
        return None
