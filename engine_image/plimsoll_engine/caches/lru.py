"""LRU cache of limited size, whose items can be pinned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """LRU cache whose items have a total size of at most ``capacity``.

    The caller chooses the unit of size. Pinned items are not evicted.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.used = 0
        self._data: dict[K, V] = {}
        self._sizes: dict[K, int] = {}
        self._order: OrderedDict[K, None] = OrderedDict()
        self._pins: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[K]:
        return iter(self._order)

    @property
    def num_pinned(self) -> int:
        """Number of pinned items."""
        return len(self._pins)

    def get(self, key: K) -> V | None:
        """Return the value of ``key``; None if it is missing. Does not change the LRU order."""
        return self._data.get(key)

    def touch(self, key: K) -> None:
        """Make ``key`` the most recently used key, unless it is missing."""
        if key in self._data:
            self._order.move_to_end(key)

    def put(self, key: K, value: V, size: int = 1) -> list[tuple[K, V]]:
        """Store ``value`` as the most recently used item, and return the items evicted for it.

        Raises MemoryError, without any change, if pinned items leave too little space.
        """
        if size < 0:
            raise ValueError(f"size must be at least 0, got {size}")
        excess = self.used - self._sizes.get(key, 0) + size - self.capacity
        evicted: list[tuple[K, V]] = []
        if excess > 0:
            if excess > self._compute_evictable_size(excluded_key=key):
                raise MemoryError(
                    f"an item of size {size} does not fit into the cache of capacity "
                    f"{self.capacity}: {len(self._pins)} of its {len(self)} items are pinned"
                )
            self.touch(key)  # evict this item last
            evicted = self.evict(excess)
        self.used += size - self._sizes.get(key, 0)
        self._data[key] = value
        self._sizes[key] = size
        self._order[key] = None
        self._order.move_to_end(key)
        return evicted

    def pin(self, key: K) -> None:
        """Protect ``key`` from eviction until it is unpinned as often. Raises KeyError."""
        if key not in self._data:
            raise KeyError(key)
        self._pins[key] = self._pins.get(key, 0) + 1
        self._order.move_to_end(key)

    def unpin(self, key: K) -> None:
        """Remove a pin from ``key``. The last one makes it the most recently used key."""
        remaining = self._pins[key] - 1
        if remaining:
            self._pins[key] = remaining
        else:
            del self._pins[key]
            self._order.move_to_end(key)

    def evict(self, size: int) -> list[tuple[K, V]]:
        """Remove and return unpinned items, least recently used first, until ``size`` is freed.

        If only pinned items are left, less is freed. Skipped items become the most recently used.
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
        """Remove and return all items that are not pinned."""
        return [(key, self._remove(key)) for key in list(self._order) if key not in self._pins]

    def discard(self, key: K) -> None:
        """Remove ``key``, unless it is pinned or missing."""
        if key in self._data and key not in self._pins:
            self._remove(key)

    def _remove(self, key: K) -> V:
        del self._order[key]
        self.used -= self._sizes.pop(key)
        return self._data.pop(key)

    def _compute_evictable_size(self, excluded_key: K) -> int:
        pinned_size = sum(self._sizes[key] for key in self._pins if key != excluded_key)
        return self.used - pinned_size - self._sizes.get(excluded_key, 0)

    def find_problems(self) -> list[str]:
        """Return an audit message for each inconsistency in this cache."""
        found = []
        order, data = set(self._order), set(self._data)
        if order != data:
            found.append(
                f"{len(order - data)} keys have no value, and {len(data - order)} values have no"
                " place in the LRU order"
            )
        if ghosts := set(self._pins) - data:
            found.append(f"{len(ghosts)} pinned keys are not in the cache")
        if self.used > self.capacity:
            found.append(f"the items' total size {self.used} exceeds the capacity {self.capacity}")
        if (total := sum(self._sizes.values())) != self.used:
            found.append(f"the items' sizes add up to {total}, but {self.used} is recorded")
        return found
