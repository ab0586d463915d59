"""A bounded least-recently-used cache whose items can be pinned.

Two rules hold at every moment, and the worker's audit checks them: the order and the data have the
same keys, and only keys that are present are pinned. So a touch of a missing key does nothing (a
ghost in the order would make an eviction loop look for it for ever), and an eviction looks at each
item at most once (a cache full of pinned items evicts nothing and says so).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most ``capacity`` items (a count). Pins are counted: an item is free at zero pins."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: must be at least 1")
        self.capacity = capacity
        self._data: dict[K, V] = {}
        self._order: OrderedDict[K, None] = OrderedDict()
        self._pins: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[K]:
        """The keys, least recently used first."""
        return iter(self._order)

    @property
    def pinned(self) -> int:
        """How many items are pinned."""
        return len(self._pins)

    def get(self, key: K) -> V | None:
        """The value, without touching it."""
        return self._data.get(key)

    def touch(self, key: K) -> None:
        """Make ``key`` the most recently used; a missing key stays missing."""
        if key in self._data:
            self._order.move_to_end(key)

    def put(self, key: K, value: V) -> list[tuple[K, V]]:
        """Store ``key`` as the most recently used and return what was evicted for it.

        A full cache of pinned items has no room: MemoryError, and nothing is stored.
        """
        evicted: list[tuple[K, V]] = []
        if key not in self._data and len(self._data) >= self.capacity:
            evicted = self.evict(len(self._data) - self.capacity + 1)
            if not evicted:
                raise MemoryError(f"all {self.capacity} items of the cache are pinned")
        self._data[key] = value
        self._order[key] = None
        self._order.move_to_end(key)
        return evicted

    def pin(self, key: K) -> None:
        """Keep ``key`` from eviction until it was unpinned as often; KeyError if it is missing."""
        if key not in self._data:
            raise KeyError(key)
        self._pins[key] = self._pins.get(key, 0) + 1
        self._order.move_to_end(key)

    def unpin(self, key: K) -> None:
        """Take one pin away; the last one leaves ``key`` as the most recently used."""
        left = self._pins[key] - 1
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]
            self._order.move_to_end(key)

    def evict(self, count: int) -> list[tuple[K, V]]:
        """Remove up to ``count`` items, least recently used first, and return them.

        A pinned item is in use, so it goes to the recent end instead. Each item is looked at
        once at most, so this ends, with fewer items than asked for when the rest is pinned.
        """
        evicted: list[tuple[K, V]] = []
        for _ in range(len(self._order)):
            if len(evicted) >= count:
                break
            key = next(iter(self._order))
            if key in self._pins:
                self._order.move_to_end(key)
                continue
            del self._order[key]
            evicted.append((key, self._data.pop(key)))
        return evicted

    def problems(self) -> list[str]:
        """What is wrong with this cache, for the audit; nothing on a sound one."""
        found = []
        order, data = set(self._order), set(self._data)
        if order != data:
            found.append(
                f"{len(order - data)} keys are in the order alone, {len(data - order)} in the data"
            )
        if ghosts := set(self._pins) - data:
            found.append(f"{len(ghosts)} pinned keys are not in the data")
        if len(data) > self.capacity:
            found.append(f"{len(data)} items, capacity {self.capacity}")
        return found
