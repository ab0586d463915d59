"""Blocks are used, cached or free, and none is ever lost or handed out twice.

Tests ``kvcache/block_pool.py``.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plimsoll_engine.kvcache.block_hashes import hash_block
from plimsoll_engine.kvcache.block_pool import BlockPool

BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Requests take, share, register and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 4)
        self.tables: list[list[int]] = []
        self.contents: dict[bytes, int] = {}

    def held(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        in_use = set(self.held())
        blocks = self.pool.allocate(count)
        if count > BLOCKS - len(in_use):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not in_use & set(blocks)
        for key in [key for key, block in self.contents.items() if block in blocks]:
            del self.contents[key]
        self.tables.append(blocks)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), content=st.integers(0, 5))
    def register(self, data: Any, content: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.held())))
        key = hash_block(b"", [content])
        if key not in self.contents and block not in self.contents.values():
            self.contents[key] = block
        self.pool.register(block, key)

    @rule(contents=st.lists(st.integers(0, 5), unique=True, max_size=4))
    def share(self, contents: list[int]) -> None:
        keys = [hash_block(b"", [content]) for content in contents]
        blocks = self.pool.find_cached_prefix(keys)
        expected = []
        for key in keys:
            if key not in self.contents:
                break
            expected.append(self.contents[key])
        assert blocks == expected
        self.pool.add_references(blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def reset(self) -> None:
        cached = self.pool.num_cached
        assert self.pool.reset_prefix_cache() == cached
        self.contents = {k: b for k, b in self.contents.items() if b in self.held()}

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.find_problems() == []
        assert self.pool.prefix.find_problems() == []
        assert self.pool.count_references() == dict(self.held())
        assert self.pool.num_used == len(self.held())
        assert len(self.pool.prefix) == len(self.contents)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, deadline=None)


def test_the_beginning_of_a_prompt_outlives_its_end() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    assert blocks is not None
    keys = [hash_block(b"", [i]) for i in range(3)]
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.find_cached_prefix(keys) == blocks[:2]


def test_a_block_hash_covers_all_before_it() -> None:
    assert hash_block(hash_block(b"", [1]), [2]) != hash_block(hash_block(b"", [3]), [2])


def test_a_double_release_is_an_error() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_a_pool_that_is_used_for_long_grows_no_objects() -> None:
    """Each count of a block's uses was an object of its own above 256: thousands, one by one."""
    pool = BlockPool(500, 4)

    def use() -> None:
        blocks = pool.allocate(500)
        assert blocks is not None
        pool.release(blocks)

    use()
    before = sys.getallocatedblocks()
    for _ in range(300):
        use()
    assert sys.getallocatedblocks() - before < 100
    assert set(pool.allocation_counts) == {301}
