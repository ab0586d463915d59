"""Manage the numbers of KV blocks: allocation, reference counts and cached prefixes.

A *used* block has references. A *cached* block has none, but a later prompt can find it by its
hash. All other blocks are *free*.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

from plimsoll_engine.caches.lru import LruCache

# CPython 3.11, rounded up.
INDEX_ENTRY_BYTES = 400


class BlockPool:
    """Pool of ``num_blocks`` blocks of ``block_size`` tokens each.

    If no block is free, it evicts the least recently used cached blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, tables: Iterable[Sequence[int]] = ()
    ) -> None:
        """Create a pool in which the blocks in ``tables`` are used and all others are free.

        ``tables`` are block tables inherited from the previous worker. Their block numbers must be
        less than ``num_blocks``, and unique within each table.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix: LruCache[bytes, int] = LruCache(num_blocks)
        self._references = [0] * num_blocks
        # Number of times that each block was allocated. The contents of a full block change only
        # then. A list would grow during the first million requests.
        self.allocation_counts = array("Q", [0]) * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self.num_used = 0
        self.num_references = 0
        for table in tables:
            for block in table:
                self.num_used += not self._references[block]
                self._references[block] += 1
                self.allocation_counts[block] = 1
            self.num_references += len(table)
        self._free = [b for b in range(num_blocks - 1, -1, -1) if not self._references[b]]

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks."""
        return len(self.prefix) - self.prefix.num_pinned

    @property
    def num_available(self) -> int:
        """Number of free and cached blocks."""
        return self.num_free + self.num_cached

    def count_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Return ``num_blocks`` blocks with one reference each; None if too few are available."""
        if num_blocks > self.num_available:
            return None
        if num_blocks > len(self._free):
            self._free_evicted(self.prefix.evict(num_blocks - len(self._free)))
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._references[block] = 1
            self.allocation_counts[block] += 1
        self.num_used += num_blocks
        self.num_references += num_blocks
        return blocks

    def find_cached_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of the longest prefix of ``hashes``. Add no references."""
        matched = []
        for key in hashes:
            block = self.prefix.get(key)
            if block is None:
                break
            self.prefix.touch(key)
            matched.append(block)
        return matched

    def add_references(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of ``blocks``, a result of :meth:`find_cached_prefix`."""
        for block in blocks:
            if self._references[block] == 0:
                self.prefix.pin(self._get_hash(block))
                self.num_used += 1
            self._references[block] += 1
        self.num_references += len(blocks)

    def register(self, block: int, key: bytes) -> None:
        """Add a full block to the prefix cache, unless the cache has it or its hash ``key``."""
        if key in self.prefix or self._hashes[block] is not None:
            return
        # The cache has room for every block, so this never evicts.
        self.prefix.put(key, block)
        self.prefix.pin(key)
        self._hashes[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block. The last block is evicted first."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise AssertionError(
                    f"block {block} was released more often than it was referenced"
                )
            self._references[block] -= 1
            self.num_references -= 1
            if self._references[block]:
                continue
            self.num_used -= 1
            key = self._hashes[block]
            if key is None:
                self._free.append(block)
            else:
                self.prefix.unpin(key)

    def list_oldest_cached(self, max_entries: int) -> list[tuple[bytes, int]]:
        """Return (hash, block) for unused blocks among the ``max_entries`` oldest cache entries."""
        oldest = ((key, self.prefix.get(key)) for key in islice(self.prefix, max_entries))
        return [(k, b) for k, b in oldest if b is not None and not self._references[b]]

    def reset_prefix_cache(self) -> int:
        """Evict all unused blocks from the prefix cache, and return their number."""
        evicted = self.prefix.evict(len(self.prefix))
        self._free_evicted(evicted)
        return len(evicted)

    def compute_index_bytes(self) -> int:
        """Return the host memory of the prefix cache's index in bytes."""
        return len(self.prefix) * INDEX_ENTRY_BYTES

    @property
    def max_index_bytes(self) -> int:
        """Maximum host memory of the prefix cache's index in bytes."""
        return self.num_blocks * INDEX_ENTRY_BYTES

    def count_references(self) -> dict[int, int]:
        """Return the number of references to each used block, by block number."""
        return {block: count for block, count in enumerate(self._references) if count}

    def find_problems(self) -> list[str]:
        """Return an audit message for each inconsistency in this pool."""
        problems = []
        if (referenced := len(self.count_references())) != self.num_used:
            problems.append(
                f"{referenced} blocks are referenced, but {self.num_used} are counted as used"
            )
        if self.num_free + self.num_used + self.num_cached != self.num_blocks:
            problems.append(
                f"the pool has {self.num_blocks} blocks, but {self.num_free} are free,"
                f" {self.num_used} used and {self.num_cached} cached"
            )
        if len(set(self._free)) != len(self._free):
            problems.append("the list of free blocks contains a block twice")
        return problems

    def _get_hash(self, block: int) -> bytes:
        key = self._hashes[block]
        if key is None:
            raise AssertionError(f"block {block} is neither used nor cached")
        return key

    def _free_evicted(self, evicted: list[tuple[bytes, int]]) -> None:
        for _, block in evicted:
            self._hashes[block] = None
            self._free.append(block)
