"""Copy cached KV blocks to host memory before the pool on the device evicts them.

A block that is on the host stays cached on the device until it is evicted. Transfers belong to no
request, so aborts and preemptions do not affect them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.kvcache.block_copies import BlockCopier, CopyTicket, wait_until
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.pool_memory import PoolTensors

# Blocks to copy ahead of their eviction: a fraction of the pool, limited because each step searches
# for them.
OFFLOAD_AHEAD_FRACTION, MAX_OFFLOAD_AHEAD_BLOCKS = 1 / 4, 256
# Fraction of the pool's blocks.
MAX_IN_TRANSFER_FRACTION = 1 / 8
# Age from which a transfer counts as stuck. Transfers normally take milliseconds.
STALE_TRANSFER_S = 5.0
RECLAIM_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Transfer:
    """Copy of blocks that is in progress."""

    keys: list[bytes]  # hashes
    blocks: list[int]  # numbers on the device
    slots: list[int]  # numbers on the host
    ticket: CopyTicket
    copy_to_host: bool
    # Counts of the blocks in the pool when a copy to the host started.
    allocation_counts: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)


class Offload:
    """Prefix cache in host memory for blocks that ``pool`` evicts."""

    def __init__(self, pool: BlockPool, copier: BlockCopier, num_slots: int) -> None:
        self.pool = pool
        self.copies = copier
        self.slots = num_slots
        # Slots on the host by hash. A slot is pinned during a transfer.
        self.stored: LruCache[bytes, int] = LruCache(num_slots)
        self.transfers: list[Transfer] = []
        self.stored_total = 0
        self.loaded_total = 0
        self._free = list(range(num_slots - 1, -1, -1))

    @classmethod
    def create(
        cls,
        pool: BlockPool,
        kv: torch.Tensor,
        size_bytes: int,
        scales: torch.Tensor | None = None,
    ) -> Offload:
        """Return a cache for as many blocks as fit into ``size_bytes`` of host memory.

        ``kv`` [2, layers, blocks * block_size, heads, dim] is the pool, with ``scales`` for FP8.
        Raises ValueError if no block fits.
        """
        block_bytes = PoolTensors(kv, scales).nbytes // pool.num_blocks
        slots = size_bytes // block_bytes
        if slots < 1:
            raise ValueError(
                f"--kv-offload-bytes must be at least {block_bytes}, the size of one KV block, got"
                f" {size_bytes}"
            )
        return cls(pool, BlockCopier(kv, pool.block_size, slots, scales), slots)

    def poll(self, is_idle: bool = False) -> None:
        """Complete finished transfers, and start copying blocks that will be evicted soon.

        Only fault injection uses ``is_idle``.
        """
        for transfer in [t for t in self.transfers if t.ticket.is_done()]:
            self.transfers.remove(transfer)
            self._complete(transfer)
        self._start_offloading()

    def fetch(self, keys: Sequence[bytes]) -> bool:
        """Start to copy a prompt's missing blocks from the host, and return whether it must wait.

        ``keys`` are the prompt's block hashes.
        """
        num_on_device = len(self.pool.find_cached_prefix(keys))
        if self.is_fetching(keys[num_on_device:]):
            return True
        offloading = {key for t in self.transfers if t.copy_to_host for key in t.keys}
        wanted: list[bytes] = []
        for key in keys[num_on_device:]:
            if key not in self.stored or key in offloading:
                break
            wanted.append(key)
        wanted = wanted[: max(0, self._count_transferable_blocks())]
        # Do not evict the prompt's own blocks to make room for the others.
        prefix_blocks = self.pool.find_cached_prefix(keys[:num_on_device])
        self.pool.add_references(prefix_blocks)
        blocks = self.pool.allocate(len(wanted)) if wanted else None
        self.pool.release(prefix_blocks)
        if blocks is None:
            return False
        slots = []
        for key in wanted:
            slot = self.stored.get(key)
            assert slot is not None
            self.stored.pin(key)
            slots.append(slot)
        ticket = self.copies.load(list(zip(blocks, slots, strict=True)))
        self.transfers.append(Transfer(wanted, blocks, slots, ticket, copy_to_host=False))
        return True

    def is_fetching(self, keys: Sequence[bytes]) -> bool:
        """Report whether a block in ``keys`` is being copied to the device.

        Stuck transfers do not count.
        """
        wanted = set(keys)
        stale_before = time.monotonic() - STALE_TRANSFER_S
        return any(
            not t.copy_to_host and t.started > stale_before and not wanted.isdisjoint(t.keys)
            for t in self.transfers
        )

    def reclaim(self) -> bool:
        """Wait until all transfers have completed, so that their blocks can be allocated.

        Return False if no transfer holds blocks, or after :data:`RECLAIM_TIMEOUT_S`.
        """
        return bool(self.list_held_blocks()) and self.wait_for_transfers(RECLAIM_TIMEOUT_S)

    def wait_for_transfers(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for all transfers. Return whether all are complete."""

        def is_complete() -> bool:
            for transfer in [t for t in self.transfers if t.ticket.is_done()]:
                self.transfers.remove(transfer)
                self._complete(transfer)
            return not self.transfers

        return wait_until(is_complete, timeout_s)

    def clear(self) -> int:
        """Remove all blocks that are not in transfer from the cache, and return their number."""
        cleared = self.stored.clear()
        self._free += [slot for _, slot in cleared]
        return len(cleared)

    def list_held_blocks(self, started_after: float = -math.inf) -> list[int]:
        """Return the device blocks that transfers started after ``started_after`` hold.

        A block occurs once per reference. Times are seconds of CLOCK_MONOTONIC.
        """
        return [
            block
            for transfer in self.transfers
            if not transfer.copy_to_host and transfer.started > started_after
            for block in transfer.blocks
        ]

    def count_lost_slots(self, started_after: float = -math.inf) -> int:
        """Return the number of slots that are pinned without a transfer in progress.

        Transfers that started before ``started_after`` (CLOCK_MONOTONIC) are not in progress.
        """
        in_transfer = {key for t in self.transfers if t.started > started_after for key in t.keys}
        return self.stored.num_pinned - len(in_transfer)

    def find_stuck_transfers(self) -> list[str]:
        """Return an audit message if a transfer is older than :data:`STALE_TRANSFER_S`."""
        now = time.monotonic()
        ages = [age for t in self.transfers if (age := now - t.started) > STALE_TRANSFER_S]
        if not ages:
            return []
        return [f"{len(ages)} KV transfers are stuck; the oldest started {max(ages):.0f} s ago"]

    def find_problems(self) -> list[str]:
        """Return an audit message for each inconsistency in this cache."""
        problems = [f"host cache: {problem}" for problem in self.stored.find_problems()]
        slots = [slot for key in self.stored if (slot := self.stored.get(key)) is not None]
        if sorted(slots + self._free) != list(range(self.slots)):
            problems.append(
                f"the host buffer has {self.slots} blocks, but {len(slots)} are stored and"
                f" {len(self._free)} free"
            )
        moving = {key for transfer in self.transfers for key in transfer.keys}
        if self.stored.num_pinned != len(moving):
            problems.append(
                f"{self.stored.num_pinned} host blocks are pinned, but {len(moving)} are in"
                " transfer"
            )
        return problems

    def close(self) -> None:
        """Wait for copies in progress, and release all blocks. Idempotent."""
        self.copies.close()
        self.pool.release(self.list_held_blocks())
        for transfer in self.transfers:
            for key in transfer.keys:
                self.stored.unpin(key)
        self.transfers.clear()
        self.clear()

    def _count_transferable_blocks(self) -> int:
        in_transfer = sum(len(transfer.blocks) for transfer in self.transfers)
        return max(1, int(self.pool.num_blocks * MAX_IN_TRANSFER_FRACTION)) - in_transfer

    def _start_offloading(self) -> None:
        if (room := self._count_transferable_blocks()) < 1:
            return
        ahead = max(
            1, min(int(self.pool.num_blocks * OFFLOAD_AHEAD_FRACTION), MAX_OFFLOAD_AHEAD_BLOCKS)
        )
        due = [(k, b) for k, b in self.pool.list_oldest_cached(ahead) if k not in self.stored]
        # A pinned slot is in transfer and cannot be evicted.
        due = due[: min(room, self.slots - self.stored.num_pinned)]
        if not due:
            return
        if (shortage := len(due) - len(self._free)) > 0:
            self._free += [slot for _, slot in self.stored.evict(shortage)]
        slots = []
        for key, _ in due:
            slot = self._free.pop()
            self.stored.put(key, slot)
            self.stored.pin(key)
            slots.append(slot)
        keys, blocks = [key for key, _ in due], [block for _, block in due]
        ticket = self.copies.store(list(zip(blocks, slots, strict=True)))
        counts = [self.pool.allocation_counts[block] for block in blocks]
        self.transfers.append(Transfer(keys, blocks, slots, ticket, True, counts))

    def _complete(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            self.stored.unpin(key)
        if transfer.copy_to_host:
            self._store_copied_blocks(transfer)
            return
        self.loaded_total += len(transfer.keys)
        for key, block in zip(transfer.keys, transfer.blocks, strict=True):
            self.pool.register(block, key)
        self.pool.release(transfer.blocks)

    def _store_copied_blocks(self, transfer: Transfer) -> None:
        rows = zip(
            transfer.keys, transfer.blocks, transfer.slots, transfer.allocation_counts, strict=True
        )
        for key, block, slot, count in rows:
            if self.pool.allocation_counts[block] == count:
                self.stored_total += 1
            else:  # the block was reallocated, so the copy may have its new contents
                self.stored.discard(key)
                self._free.append(slot)
