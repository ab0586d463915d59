"""Inherit the KV blocks of the predecessor's requests in a planned restart.

Only blocks in the tables of the handover message are taken over, and all other blocks are free (see
:mod:`plimsoll_engine.core.handover.export`). A table is kept until the frontend submits its request
again with all tokens. The request gets the table only if the blocks were computed for the same
tokens.
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

CLAIM_TIMEOUT_S = 10.0
"""Time after which unclaimed tables are released.

The frontend submits carried-over requests at once. The time is measured from the worker's first
step, because the worker's start may take longer if the machine is busy.
"""


def validate_tables(
    data: bytes, layout: PoolLayout, runner: Runner, max_num_seqs: int
) -> list[BlockTable]:
    """Return the tables in the handover message ``data``, after checking all but their tokens.

    Raises :class:`HandoverRefusedError` if a check fails.
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
    """Inherited tables whose requests have not arrived yet.

    Each table has a reference to each of its blocks in ``pool``.
    """

    def __init__(self, tables: Sequence[BlockTable], pool: BlockPool) -> None:
        self._tables = {table.request_id: table for table in tables}
        self._pool = pool
        self._since: float | None = None
        """Time of the first call of :meth:`release_expired_tables`, or None before that call."""
        self.adopted: list[str] = []
        self.refused: dict[str, str] = {}
        """By request ID, the reason why the request did not get its table."""

    def release_expired_tables(self) -> None:
        """Release unclaimed tables after :data:`CLAIM_TIMEOUT_S`. Call this between steps.

        The reasons are kept in :attr:`refused` until the frontend queries them.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since > CLAIM_TIMEOUT_S:
            late = f"the request did not arrive within {CLAIM_TIMEOUT_S:g} s"
            self.refused |= dict.fromkeys(self._tables, late)
            self.release_tables()

    def list_held_blocks(self) -> list[int]:
        """Return the blocks of unclaimed tables, with one entry per reference."""
        return [block for table in self._tables.values() for block in table.blocks]

    def claim_table(self, request: Request) -> None:
        """Give ``request`` its inherited table, if there is one for the same tokens."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        if (why := self._find_mismatch(table, request)) is not None:
            self._pool.release(table.blocks)
            self.refused[request.request_id] = why
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
                f"the predecessor computed {table.computed} tokens,"
                f" but the request has {len(request.token_ids)}"
            )
        size = self._pool.block_size
        extend_block_hashes(request, size)
        if request.block_hashes[: len(table.hashes)] != table.hashes:
            return "the computed tokens differ from the request's tokens"
        if hash_tail(request, table.computed, size) != table.tail:
            return "the computed tokens in the last block differ from the request's tokens"
        return None
