"""Keys and values over a planned restart: what a worker takes over, and which request gets it.

It takes the tables of its predecessor's message alone (see :mod:`export
<plimsoll_engine.core.handover.export>`): a block that no request had in it is free, whatever the
predecessor thought of it. Each table waits for its request, which the frontend submits again with
all its tokens, and goes to it only if those tokens are the ones that were computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.handover import audit
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.prefix_hashes import extend_block_hashes, hash_tail
from plimsoll_engine.messages import handover as messages
from plimsoll_engine.messages.handover import HandoverRefused, Layout, Outcome, Table

WAIT_S = 10.0
"""The frontend submits what it carries over at once; tables without a request go by then. Counted
from the moment at which the worker begins to listen: on a machine that is short of CPU time, making
its last things ready takes longer than that.
"""


def validate_tables(data: bytes, layout: Layout, runner: Runner, max_num_seqs: int) -> list[Table]:
    """Return the tables of a message once all in them is checked that can be without the tokens.

    Raises :class:`HandoverRefused`.
    """
    handover = messages.unseal(data)
    audit.check(handover, layout, max_num_seqs)
    expected = {
        block: total
        for table in handover.tables
        for block, total in zip(table.blocks, table.sums, strict=True)
    }
    blocks = sorted(expected)
    changed = [
        block
        for block, total in zip(blocks, runner.block_sums(blocks), strict=True)
        if expected[block] != total
    ]
    if changed:
        raise HandoverRefused(
            Outcome.BAD_CONTENTS,
            f"{len(changed)} of {len(blocks)} blocks were written to since, block {changed[0]}"
            " first",
        )
    return handover.tables


class Inheritance:
    """The tables that wait for their requests. ``pool`` references their blocks."""

    def __init__(self, tables: Sequence[Table], pool: BlockPool) -> None:
        self._tables = {table.request_id: table for table in tables}
        self._pool = pool
        self._since: float | None = None
        """When the worker began to listen."""
        self.adopted: list[str] = []
        self.refused: dict[str, str] = {}
        """Why a request did not get its table."""

    def expire(self) -> None:
        """Free the tables of requests that will not come; call it again and again.

        What became of the others is kept: the frontend has yet to ask.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since > WAIT_S:
            late = f"the request did not come within {WAIT_S:g} s"
            self.refused |= dict.fromkeys(self._tables, late)
            self.settle()

    def held_blocks(self) -> list[int]:
        """Return the blocks of the tables that wait, one entry a reference."""
        return [block for table in self._tables.values() for block in table.blocks]

    def claim(self, request: Request) -> None:
        """Give ``request`` its table, if there is one and it is of the same tokens."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        if (why := self._mismatch(table, request)) is not None:
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

    def settle(self) -> None:
        """Free the blocks of the tables that no request claimed."""
        for table in self._tables.values():
            self._pool.release(table.blocks)
        self._tables.clear()

    def _mismatch(self, table: Table, request: Request) -> str | None:
        if request.unscored:
            return "log probabilities of its prompt are yet to be computed"
        if len(request.token_ids) <= table.computed:
            return f"{table.computed} tokens were computed, it has {len(request.token_ids)}"
        size = self._pool.block_size
        extend_block_hashes(request, size)
        if request.block_hashes[: len(table.hashes)] != table.hashes:
            return "other tokens were computed"
        if hash_tail(request, table.computed, size) != table.tail:
            return "other tokens were computed in its last block"
        return None
