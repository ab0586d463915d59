"""Frontend's cache of processed images and audio clips."""

from __future__ import annotations

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.multimodal.processor import ProcessedMedia


class ProcessorCache:
    """Cache of processed media, whose tensors have up to ``capacity`` bytes in total."""

    def __init__(self, capacity: int) -> None:
        self._items: LruCache[bytes, ProcessedMedia] = LruCache(capacity)

    @property
    def nbytes(self) -> int:
        """Total size of the cached tensors in bytes."""
        return self._items.used

    @property
    def capacity(self) -> int:
        """Maximum total size of the cached tensors in bytes."""
        return self._items.capacity

    def get(self, key: bytes) -> ProcessedMedia | None:
        """Return the item for ``key``, now the most recently used; None if it is missing."""
        cached = self._items.get(key)
        if cached is not None:
            self._items.touch(key)
        return cached

    def put(self, item: ProcessedMedia) -> None:
        """Cache ``item``, unless it is larger than the capacity."""
        if len(item.data) <= self._items.capacity:
            self._items.put(item.key, item, len(item.data))

    def clear(self) -> int:
        """Remove all items and return their number."""
        return len(self._items.clear())

    def find_problems(self) -> list[str]:
        """Return an audit message for each inconsistency in this cache."""
        return self._items.find_problems()
