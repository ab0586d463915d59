"""Prefix blocks that are about to be evicted move to host memory, and come back for a later prompt.

The cached blocks that will be evicted next are copied out ahead of time; they stay where they are,
and what was taken for something else meanwhile is not kept. A prompt whose beginning lies on the
host waits until it is copied in. Copies go on beside the model's work, and :meth:`poll` takes in
those that are done: between steps, and also while the engine is idle.

A transfer belongs to the pool and never to a request: one that copies in references its device
blocks itself and ends by making them ordinary cached blocks. So neither an abort nor a preemption
concerns it, and no block can be left behind by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.kvcache.block_copies import Copies, Ticket, wait_for
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.pool_memory import PoolTensors

AHEAD, MAX_AHEAD = 4, 256
"""The oldest cached blocks are copied out: the pool's AHEAD-th part, MAX_AHEAD at most, since
every step looks through them."""
IN_FLIGHT = 8
"""At most the IN_FLIGHT-th part of the pool's blocks are in transfer."""
STALE_S = 5.0
"""A transfer takes milliseconds; one of this age is looked after by nobody."""
RECLAIM_WAIT_S = 2.0


@dataclass(slots=True)
class Transfer:
    """``keys`` [n] of the contents, ``blocks`` [n] on the device and ``slots`` [n] on the host.

    ``taken`` [n] is how often each block had been allocated when the copy began.
    """

    keys: list[bytes]
    blocks: list[int]
    slots: list[int]
    ticket: Ticket
    to_host: bool
    taken: list[int] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)


class Offload:
    """The host's part of one pool's prefix cache: at most ``slots`` blocks."""

    def __init__(self, pool: BlockPool, copies: Copies, slots: int) -> None:
        self.pool = pool
        self.copies = copies
        self.slots = slots
        self.stored: LruCache[bytes, int] = LruCache(slots)
        """Key to slot. Pinned while a transfer reads or writes the slot."""
        self.transfers: list[Transfer] = []
        self.stored_total = 0
        self.loaded_total = 0
        self._free = list(range(slots - 1, -1, -1))

    @classmethod
    def of_bytes(
        cls,
        pool: BlockPool,
        kv: torch.Tensor,
        size_bytes: int,
        scales: torch.Tensor | None = None,
    ) -> Offload:
        """Return one with as many host blocks of ``kv``, the runner's pool, as ``size_bytes`` hold.

        ``kv`` is [2, layers, blocks * block_size, heads, dim] of any dtype, ``scales`` those of an
        FP8 pool. ValueError where the bytes hold no block.
        """
        block_bytes = PoolTensors(kv, scales).nbytes // pool.num_blocks
        slots = size_bytes // block_bytes
        if slots < 1:
            raise ValueError(f"{size_bytes} bytes hold no KV block; one takes {block_bytes}")
        return cls(pool, Copies(kv, pool.block_size, slots, scales), slots)

    def poll(self, idle: bool = False) -> None:
        """Take in the transfers that are done and begin those that are due.

        Transfers end whether steps run or not, so ``idle`` (no step runs) changes nothing here. It
        is for the injected fault that looks after transfers in steps alone.
        """
        for transfer in [t for t in self.transfers if t.ticket.done()]:
            self.transfers.remove(transfer)
            self._finished(transfer)
        self._move_out()

    def fetch(self, keys: Sequence[bytes]) -> bool:
        """Begin to copy in the blocks after those of ``keys`` that are on the device already.

        True where the prompt with these blocks is better off waiting for them.
        """
        here = len(self.pool.lookup(keys))
        if self.brings(keys[here:]):
            return True
        leaving = {key for t in self.transfers if t.to_host for key in t.keys}
        wanted: list[bytes] = []
        for key in keys[here:]:
            if key not in self.stored or key in leaving:
                break
            wanted.append(key)
        wanted = wanted[: max(0, self._room())]
        # The prompt's blocks on the device must not be evicted for those that join them.
        held = self.pool.lookup(keys[:here])
        self.pool.share(held)
        blocks = self.pool.allocate(len(wanted)) if wanted else None
        self.pool.release(held)
        if blocks is None:
            return False
        slots = []
        for key in wanted:
            slot = self.stored.get(key)
            assert slot is not None
            self.stored.pin(key)
            slots.append(slot)
        ticket = self.copies.load(list(zip(blocks, slots, strict=True)))
        self.transfers.append(Transfer(wanted, blocks, slots, ticket, to_host=False))
        return True

    def brings(self, keys: Sequence[bytes]) -> bool:
        """Whether a transfer is bringing one of ``keys``, and in good time."""
        wanted = set(keys)
        late = time.monotonic() - STALE_S
        return any(
            not t.to_host and t.begun > late and not wanted.isdisjoint(t.keys)
            for t in self.transfers
        )

    def reclaim(self) -> bool:
        """Wait for the transfers, so that the blocks they hold can be allocated.

        False where they hold none or do not end (:data:`RECLAIM_WAIT_S`).
        """
        return bool(self.held_blocks()) and self.settle(RECLAIM_WAIT_S)

    def settle(self, timeout_s: float) -> bool:
        """Whether no transfer is left after at most ``timeout_s`` seconds."""

        def settled() -> bool:
            for transfer in [t for t in self.transfers if t.ticket.done()]:
                self.transfers.remove(transfer)
                self._finished(transfer)
            return not self.transfers

        return wait_for(settled, timeout_s)

    def clear(self) -> int:
        """Forget what is stored and not in transfer; how many blocks that were."""
        cleared = self.stored.clear()
        self._free += [slot for _, slot in cleared]
        return len(cleared)

    def held_blocks(self, begun_after: float = -math.inf) -> list[int]:
        """Device blocks that transfers reference, one entry a reference."""
        return [
            block
            for transfer in self.transfers
            if not transfer.to_host and transfer.begun > begun_after
            for block in transfer.blocks
        ]

    def lost_slots(self, begun_after: float = -math.inf) -> int:
        """Return host blocks that are pinned, but by no transfer begun after ``begun_after``.

        Nothing can be stored in their place.
        """
        moving = {key for t in self.transfers if t.begun > begun_after for key in t.keys}
        return self.stored.pinned - len(moving)

    def stale(self) -> list[float]:
        """Return the ages in seconds of transfers that nobody looks after."""
        now = time.monotonic()
        return [age for t in self.transfers if (age := now - t.begun) > STALE_S]

    def problems(self) -> list[str]:
        """Return what is wrong here, for the audit; nothing on a sound one."""
        found = [f"host cache: {problem}" for problem in self.stored.problems()]
        slots = [slot for key in self.stored if (slot := self.stored.get(key)) is not None]
        if sorted(slots + self._free) != list(range(self.slots)):
            found.append(
                f"{len(slots)} stored + {len(self._free)} free host blocks are not the"
                f" {self.slots} of the buffer, each once"
            )
        moving = {key for transfer in self.transfers for key in transfer.keys}
        if self.stored.pinned != len(moving):
            found.append(
                f"{self.stored.pinned} host blocks are pinned, {len(moving)} are in transfer"
            )
        return found

    def close(self) -> None:
        """Wait for the copies and give every block back. Again does nothing more."""
        self.copies.close()
        self.pool.release(self.held_blocks())
        for transfer in self.transfers:
            for key in transfer.keys:
                self.stored.unpin(key)
        self.transfers.clear()
        self.clear()

    def _room(self) -> int:
        """How many more blocks may be in transfer."""
        moving = sum(len(transfer.blocks) for transfer in self.transfers)
        return max(1, self.pool.num_blocks // IN_FLIGHT) - moving

    def _move_out(self) -> None:
        if (room := self._room()) < 1:
            return
        ahead = max(1, min(self.pool.num_blocks // AHEAD, MAX_AHEAD))
        due = [(k, b) for k, b in self.pool.oldest(ahead) if k not in self.stored]
        # What is in transfer cannot make room on the host.
        due = due[: min(room, self.slots - self.stored.pinned)]
        if not due:
            return
        if (short := len(due) - len(self._free)) > 0:
            self._free += [slot for _, slot in self.stored.evict(short)]
        slots = []
        for key, _ in due:
            slot = self._free.pop()
            self.stored.put(key, slot)
            self.stored.pin(key)
            slots.append(slot)
        keys, blocks = [key for key, _ in due], [block for _, block in due]
        ticket = self.copies.store(list(zip(blocks, slots, strict=True)))
        taken = [self.pool.taken[block] for block in blocks]
        self.transfers.append(Transfer(keys, blocks, slots, ticket, True, taken))

    def _finished(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            self.stored.unpin(key)
        if transfer.to_host:
            self._stored(transfer)
            return
        self.loaded_total += len(transfer.keys)
        for key, block in zip(transfer.keys, transfer.blocks, strict=True):
            self.pool.register(block, key)
        self.pool.release(transfer.blocks)

    def _stored(self, transfer: Transfer) -> None:
        rows = zip(transfer.keys, transfer.blocks, transfer.slots, transfer.taken, strict=True)
        for key, block, slot, taken in rows:
            if self.pool.taken[block] == taken:
                self.stored_total += 1
            else:  # evicted and written meanwhile: the copy may be of either
                self.stored.discard(key)
                self._free.append(slot)
