"""The pool of KV blocks: who holds which, and which still hold a prompt's beginning.

A block is in one of three states: *used* (referenced by one or more requests), *cached* (by none,
but its contents have a hash, so a later prompt may take it again) or *free*. The three counts add
up to the pool's size at every moment. Only numbers live here; the tensors are the runner's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

from plimsoll_engine.caches.lru import LruCache

INDEX_ENTRY_BYTES = 400
"""Of one cached block's hash in the cache's dictionaries and its key (CPython 3.11, rounded up)."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens each.

    The prefix cache maps a block's hash to its number. Blocks in use are pinned in it; the others
    are evicted, least recently used first, when the free blocks are spent.
    """

    def __init__(
        self, num_blocks: int, block_size: int, tables: Iterable[Sequence[int]] = ()
    ) -> None:
        """Make a pool in which each of ``tables`` references its blocks; all others are free.

        The tables are those of a predecessor: what it had lost is free again. Each of their blocks
        is among the ``num_blocks``, and no table has one twice.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks}, block_size {block_size}: at least 1 each")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix: LruCache[bytes, int] = LruCache(num_blocks)
        self._references = [0] * num_blocks
        self.taken = array("Q", [0]) * num_blocks
        """How often each block was allocated: while that is unchanged, so are its full contents.
        An array, since numbers above 256 are objects: a list would grow for the first million
        requests."""
        self._hashes: list[bytes | None] = [None] * num_blocks
        self.used = 0
        self.held = 0
        """References of all blocks together: what the holders' own counts must add up to."""
        for table in tables:
            for block in table:
                self.used += not self._references[block]
                self._references[block] += 1
                self.taken[block] = 1
            self.held += len(table)
        self._free = [b for b in range(num_blocks - 1, -1, -1) if not self._references[b]]

    @property
    def free(self) -> int:
        """Blocks that nothing uses and that hold no prefix."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that no request uses, kept for a prompt with the same prefix."""
        return len(self.prefix) - self.prefix.pinned

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free ones and those that may be evicted."""
        return self.free + self.cached

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None where there are not as many."""
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
        """Return the blocks of the longest cached beginning, without taking them."""
        found = []
        for key in hashes:
            block = self.prefix.get(key)
            if block is None:
                break
            self.prefix.touch(key)
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of ``blocks``, which :meth:`lookup` found."""
        for block in blocks:
            if self._references[block] == 0:
                self.prefix.pin(self._hash_of(block))
                self.used += 1
            self._references[block] += 1
        self.held += len(blocks)

    def register(self, block: int, key: bytes) -> None:
        """Offer the full block to later prompts, unless another block holds the same contents."""
        if key in self.prefix or self._hashes[block] is not None:
            return
        # There is an entry for each block at most, so the cache never evicts here.
        self.prefix.put(key, block)
        self.prefix.pin(key)
        self._hashes[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back for each block; the last blocks of a prompt are evicted first."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise AssertionError(f"block {block} was released more often than it was taken")
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
        """(hash, block) of the cached blocks among the ``count`` that were not used for longest."""
        found = ((key, self.prefix.get(key)) for key in islice(self.prefix, count))
        return [(k, b) for k, b in found if b is not None and not self._references[b]]

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request uses; returns how many became free."""
        evicted = self.prefix.evict(len(self.prefix))
        self._forget(evicted)
        return len(evicted)

    def index_bytes(self) -> int:
        """Host memory of the prefix cache's index; the contents are in the pool's tensors."""
        return len(self.prefix) * INDEX_ENTRY_BYTES

    @property
    def index_bytes_bound(self) -> int:
        """The most host bytes that the index of prefixes can take."""
        return self.num_blocks * INDEX_ENTRY_BYTES

    def references(self) -> dict[int, int]:
        """Return the used blocks and how many requests hold each."""
        return {block: count for block, count in enumerate(self._references) if count}

    def problems(self) -> list[str]:
        """Return what is wrong with this pool, for the audit; nothing on a sound one."""
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
