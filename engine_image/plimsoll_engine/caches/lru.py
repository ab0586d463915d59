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
    """Items whose sizes add up to at most ``capacity``.

    A size is in the cache's own unit: 1 each where items are counted, bytes where they are weighed.
    Pins are counted: an item is free at zero pins.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: must be at least 1")
        self.capacity = capacity
        self.used = 0
        """The sum of all sizes."""
        self._data: dict[K, V] = {}
        self._sizes: dict[K, int] = {}
        self._order: OrderedDict[K, None] = OrderedDict()
        self._pins: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[K]:
        """Return the keys, least recently used first."""
        return iter(self._order)

    @property
    def pinned(self) -> int:
        """How many items are pinned."""
        return len(self._pins)

    def get(self, key: K) -> V | None:
        """Return the value, without touching it."""
        return self._data.get(key)

    def touch(self, key: K) -> None:
        """Make ``key`` the most recently used; a missing key stays missing."""
        if key in self._data:
            self._order.move_to_end(key)

    def put(self, key: K, value: V, size: int = 1) -> list[tuple[K, V]]:
        """Store ``key`` as the most recently used and return what was evicted for it.

        Where even the eviction of all that may go leaves no room: MemoryError, and nothing changes.
        """
        if size < 0:
            raise ValueError(f"size {size}: must not be negative")
        excess = self.used - self._sizes.get(key, 0) + size - self.capacity
        evicted: list[tuple[K, V]] = []
        if excess > 0:
            if excess > self._evictable(besides=key):
                raise MemoryError(
                    f"no room for {size} in a cache of {self.capacity}:"
                    f" {len(self._pins)} of its {len(self)} items are pinned"
                )
            self.touch(key)  # the last that an eviction looks at
            evicted = self.evict(excess)
        self.used += size - self._sizes.get(key, 0)
        self._data[key] = value
        self._sizes[key] = size
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

    def evict(self, size: int) -> list[tuple[K, V]]:
        """Remove items, least recently used first, until ``size`` is free, and return them.

        A pinned item is in use, so it goes to the recent end instead. Each item is looked at
        once at most, so this ends, with less than what was asked for when the rest is pinned.
        """
        evicted: list[tuple[K, V]] = []
        target = self.used - size
        for _ in range(len(self._order)):
            if self.used <= target:
                break
            key = next(iter(self._order))
            if key in self._pins:
                self._order.move_to_end(key)
                continue
            evicted.append((key, self._remove(key)))
        return evicted

    def clear(self) -> list[tuple[K, V]]:
        """Remove every item that is not pinned, and return them."""
        return [(key, self._remove(key)) for key in list(self._order) if key not in self._pins]

    def discard(self, key: K) -> None:
        """Remove ``key`` where it is present; a pinned one stays."""
        if key in self._data and key not in self._pins:
            self._remove(key)

    def _remove(self, key: K) -> V:
        del self._order[key]
        self.used -= self._sizes.pop(key)
        return self._data.pop(key)

    def _evictable(self, besides: K) -> int:
        """Return what the eviction of every other item that is not pinned would free."""
        kept = sum(self._sizes[key] for key in self._pins if key != besides)
        return self.used - kept - self._sizes.get(besides, 0)

    def problems(self) -> list[str]:
        """Return what is wrong with this cache, for the audit; nothing on a sound one."""
        found = []
        order, data = set(self._order), set(self._data)
        if order != data:
            found.append(
                f"{len(order - data)} keys are in the order alone, {len(data - order)} in the data"
            )
        if ghosts := set(self._pins) - data:
            found.append(f"{len(ghosts)} pinned keys are not in the data")
        if self.used > self.capacity:
            found.append(f"items of {self.used} in all, capacity {self.capacity}")
        if (total := sum(self._sizes.values())) != self.used:
            found.append(f"the items' sizes are {total} in all, {self.used} are counted")
        return found
