"""Pool of KV blocks: reference counts and the prefix cache.

A block is *used* (referenced by one or more requests), *cached* (unreferenced, but indexed by its
hash for later prompts) or *free*. The three counts always add up to the pool's size. This module
has block numbers only; the runner has the tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

from plimsoll_engine.caches.lru import LruCache

INDEX_ENTRY_BYTES = 400
"""Bytes of one cached block's index entry and hash (CPython 3.11, rounded up)."""


class BlockPool:
    """Pool of ``num_blocks`` blocks of ``block_size`` tokens each.

    The prefix cache maps a block's hash to its number. It pins used blocks. Cached blocks are
    evicted in LRU order once no block is free.
    """

    def __init__(
        self, num_blocks: int, block_size: int, tables: Iterable[Sequence[int]] = ()
    ) -> None:
        """Create a pool in which each of ``tables`` references its blocks; all others are free.

        The tables come from a predecessor. Each block number must be below ``num_blocks`` and occur
        only once in a table.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks}, block_size {block_size}: at least 1 each")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix: LruCache[bytes, int] = LruCache(num_blocks)
        self._references = [0] * num_blocks
        self.taken = array("Q", [0]) * num_blocks
        """Number of allocations of each block. A full block's contents change only when it is
        allocated.

        It is an array because a list of large integers would grow with the first million requests.
        """
        self._hashes: list[bytes | None] = [None] * num_blocks
        self.used = 0
        self.held = 0
        """Total number of references, which must match the holders' own counts."""
        for table in tables:
            for block in table:
                self.used += not self._references[block]
                self._references[block] += 1
                self.taken[block] = 1
            self.held += len(table)
        self._free = [b for b in range(num_blocks - 1, -1, -1) if not self._references[b]]

    @property
    def free(self) -> int:
        """Number of blocks that are neither used nor cached."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks that no request uses and that are cached for later prompts."""
        return len(self.prefix) - self.prefix.pinned

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated: all that are free or evictable."""
        return self.free + self.cached

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks with one reference each; None if too few are available."""
        if count > self.available:
            return None
        if count > len(self._free):
            self._forget(self.prefix.evict(count - len(self._free)))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self.taken[block] += 1
        self.used += count
        self.held += count
        return blocks

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, without referencing them."""
        found = []
        for key in hashes:
            block = self.prefix.get(key)
            if block is None:
                break
            self.prefix.touch(key)
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of ``blocks``, which :meth:`lookup` returned."""
        for block in blocks:
            if self._references[block] == 0:
                self.prefix.pin(self._hash_of(block))
                self.used += 1
            self._references[block] += 1
        self.held += len(blocks)

    def register(self, block: int, key: bytes) -> None:
        """Add a full block to the prefix cache, unless an equal block is cached."""
        if key in self.prefix or self._hashes[block] is not None:
            return
        # Each block has at most one entry, so the cache never evicts here.
        self.prefix.put(key, block)
        self.prefix.pin(key)
        self._hashes[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The last blocks of a prompt are evicted first."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise AssertionError(
                    f"block {block} was released more often than it was referenced"
                )
            self._references[block] -= 1
            self.held -= 1
            if self._references[block]:
                continue
            self.used -= 1
            key = self._hashes[block]
            if key is None:
                self._free.append(block)
            else:
                self.prefix.unpin(key)

    def oldest(self, count: int) -> list[tuple[bytes, int]]:
        """Return (hash, block) of each cached block in the first ``count`` entries of the LRU."""
        found = ((key, self.prefix.get(key)) for key in islice(self.prefix, count))
        return [(k, b) for k, b in found if b is not None and not self._references[b]]

    def reset_prefix_cache(self) -> int:
        """Evict every cached block that no request uses. Return their number."""
        evicted = self.prefix.evict(len(self.prefix))
        self._forget(evicted)
        return len(evicted)

    def index_bytes(self) -> int:
        """Return the host memory of the prefix cache's index."""
        return len(self.prefix) * INDEX_ENTRY_BYTES

    @property
    def index_bytes_bound(self) -> int:
        """Maximum host memory of the prefix cache's index."""
        return self.num_blocks * INDEX_ENTRY_BYTES

    def references(self) -> dict[int, int]:
        """Return the number of references to each used block."""
        return {block: count for block, count in enumerate(self._references) if count}

    def find_problems(self) -> list[str]:
        """Return the inconsistencies of this pool, for the audit."""
        found = []
        if (referenced := len(self.references())) != self.used:
            found.append(f"{referenced} blocks are referenced, {self.used} are counted as used")
        if self.free + self.used + self.cached != self.num_blocks:
            found.append(
                f"{self.free} free + {self.used} used + {self.cached} cached blocks"
                f" are not the pool's {self.num_blocks}"
            )
        if len(set(self._free)) != len(self._free):
            found.append("a block is free twice")
        return found

    def _hash_of(self, block: int) -> bytes:
        key = self._hashes[block]
        if key is None:
            raise AssertionError(f"block {block} is neither used nor cached")
        return key

    def _forget(self, evicted: list[tuple[bytes, int]]) -> None:
        for _, block in evicted:
            self._hashes[block] = None
            self._free.append(block)
