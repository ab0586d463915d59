"""Offload of cached KV blocks to host memory, before they are evicted from the device.

The next blocks to be evicted are copied to the host ahead of time, and stay cached on the device. A
copy of a block that was reallocated meanwhile is discarded. A prompt whose prefix is on the host
waits until it is copied back. Copies run beside the model's work; :meth:`Offload.poll` completes
them between steps, and also while the engine is idle.

A transfer belongs to the pool and never to a request. A transfer to the device references its
blocks itself, and leaves them as ordinary cached blocks. Aborts and preemptions therefore do not
affect transfers, and cannot leak their blocks.
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
"""Share and maximum number of the oldest cached blocks that are copied ahead of time.

The share is 1/AHEAD of the pool. The maximum limits the cost, because every step scans them.
"""
IN_FLIGHT = 8
"""At most 1/IN_FLIGHT of the pool's blocks are in transfer."""
STALE_S = 5.0
"""Age at which a transfer counts as stuck; a healthy one takes milliseconds."""
RECLAIM_WAIT_S = 2.0


@dataclass(slots=True)
class Transfer:
    """Running copy of blocks.

    ``keys`` [n] are their hashes, ``blocks`` [n] their numbers on the device and ``slots`` [n]
    those on the host. ``taken`` [n] is the number of allocations of each block when the copy
    started.
    """

    keys: list[bytes]
    blocks: list[int]
    slots: list[int]
    ticket: Ticket
    to_host: bool
    taken: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)


class Offload:
    """Prefix cache of one pool in host memory, with at most ``slots`` blocks."""

    def __init__(self, pool: BlockPool, copies: Copies, slots: int) -> None:
        self.pool = pool
        self.copies = copies
        self.slots = slots
        self.stored: LruCache[bytes, int] = LruCache(slots)
        """Slot by hash. Pinned while a transfer reads or writes the slot."""
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
        """Return an offload of as many blocks of the pool ``kv`` as fit into ``size_bytes``.

        ``kv`` is [2, layers, blocks * block_size, heads, dim] of any dtype, ``scales`` those of an
        FP8 pool. Raises ValueError if no block fits.
        """
        block_bytes = PoolTensors(kv, scales).nbytes // pool.num_blocks
        slots = size_bytes // block_bytes
        if slots < 1:
            raise ValueError(f"{size_bytes} bytes hold no KV block; one takes {block_bytes}")
        return cls(pool, Copies(kv, pool.block_size, slots, scales), slots)

    def poll(self, idle: bool = False) -> None:
        """Complete the finished transfers and start those that are due.

        ``idle`` means that no step runs. It makes no difference here; an injected fault uses it to
        poll transfers only in steps.
        """
        for transfer in [t for t in self.transfers if t.ticket.done()]:
            self.transfers.remove(transfer)
            self._complete(transfer)
        self._move_out()

    def fetch(self, keys: Sequence[bytes]) -> bool:
        """Start copying back the blocks of ``keys`` that follow those on the device.

        Return True if the prompt with these blocks should wait for them.
        """
        here = len(self.pool.lookup(keys))
        if self.is_fetching(keys[here:]):
            return True
        leaving = {key for t in self.transfers if t.to_host for key in t.keys}
        wanted: list[bytes] = []
        for key in keys[here:]:
            if key not in self.stored or key in leaving:
                break
            wanted.append(key)
        wanted = wanted[: max(0, self._room())]
        # Do not evict the prompt's own blocks to allocate the others.
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

    def is_fetching(self, keys: Sequence[bytes]) -> bool:
        """Report whether a transfer, not yet stuck, copies a block of ``keys`` to the device."""
        wanted = set(keys)
        late = time.monotonic() - STALE_S
        return any(
            not t.to_host and t.started > late and not wanted.isdisjoint(t.keys)
            for t in self.transfers
        )

    def reclaim(self) -> bool:
        """Wait for the transfers, so that their blocks can be allocated.

        Return False if they hold none or do not end within :data:`RECLAIM_WAIT_S`.
        """
        return bool(self.list_held_blocks()) and self.settle(RECLAIM_WAIT_S)

    def settle(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for all transfers. Report whether none is left."""

        def settled() -> bool:
            for transfer in [t for t in self.transfers if t.ticket.done()]:
                self.transfers.remove(transfer)
                self._complete(transfer)
            return not self.transfers

        return wait_for(settled, timeout_s)

    def clear(self) -> int:
        """Remove the blocks that are not in transfer. Return their number."""
        cleared = self.stored.clear()
        self._free += [slot for _, slot in cleared]
        return len(cleared)

    def list_held_blocks(self, started_after: float = -math.inf) -> list[int]:
        """Return the device blocks that transfers reference, once for each reference.

        Only transfers that started after ``started_after`` (CLOCK_MONOTONIC) count.
        """
        return [
            block
            for transfer in self.transfers
            if not transfer.to_host and transfer.started > started_after
            for block in transfer.blocks
        ]

    def lost_slots(self, started_after: float = -math.inf) -> int:
        """Return the number of host blocks that are pinned without a live transfer.

        A transfer is live if it started after ``started_after``. Lost blocks cannot be reused.
        """
        moving = {key for t in self.transfers if t.started > started_after for key in t.keys}
        return self.stored.pinned - len(moving)

    def forgotten_transfers(self) -> list[str]:
        """Return what the audit finds wrong: transfers that nothing has polled for a while."""
        now = time.monotonic()
        ages = [age for t in self.transfers if (age := now - t.started) > STALE_S]
        if not ages:
            return []
        return [f"{len(ages)} KV transfers are not looked after, the oldest for {max(ages):.0f} s"]

    def find_problems(self) -> list[str]:
        """Return the inconsistencies of this cache, for the audit."""
        found = [f"host cache: {problem}" for problem in self.stored.find_problems()]
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
        """Wait for the copies and release every block. Idempotent."""
        self.copies.close()
        self.pool.release(self.list_held_blocks())
        for transfer in self.transfers:
            for key in transfer.keys:
                self.stored.unpin(key)
        self.transfers.clear()
        self.clear()

    def _room(self) -> int:
        """Return the number of blocks that may still be added to transfers."""
        moving = sum(len(transfer.blocks) for transfer in self.transfers)
        return max(1, self.pool.num_blocks // IN_FLIGHT) - moving

    def _move_out(self) -> None:
        if (room := self._room()) < 1:
            return
        ahead = max(1, min(self.pool.num_blocks // AHEAD, MAX_AHEAD))
        due = [(k, b) for k, b in self.pool.oldest(ahead) if k not in self.stored]
        # Pinned slots are in transfer and cannot be evicted.
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

    def _complete(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            self.stored.unpin(key)
        if transfer.to_host:
            self._keep_copies(transfer)
            return
        self.loaded_total += len(transfer.keys)
        for key, block in zip(transfer.keys, transfer.blocks, strict=True):
            self.pool.register(block, key)
        self.pool.release(transfer.blocks)

    def _keep_copies(self, transfer: Transfer) -> None:
        rows = zip(transfer.keys, transfer.blocks, transfer.slots, transfer.taken, strict=True)
        for key, block, slot, taken in rows:
            if self.pool.taken[block] == taken:
                self.stored_total += 1
            else:  # reallocated meanwhile: the copy may have the new contents
                self.stored.discard(key)
                self._free.append(slot)
