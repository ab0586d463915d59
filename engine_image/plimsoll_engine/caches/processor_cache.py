"""Cache processed media in the frontend, so that a repeated image is decoded only once."""

from __future__ import annotations

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.multimodal.processor import ProcessedMedia


class ProcessorCache:
    """Cache of processed media by key. Its tensors take at most ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self._items: LruCache[bytes, ProcessedMedia] = LruCache(capacity)

    @property
    def nbytes(self) -> int:
        """Total size of the cached tensors, in bytes."""
        return self._items.used

    @property
    def capacity(self) -> int:
        """Maximum total size of the tensors, in bytes."""
        return self._items.capacity

    def get(self, key: bytes) -> ProcessedMedia | None:
        """Return the item for ``key``, and make it the most recently used; None if missing."""
        cached = self._items.get(key)
        if cached is not None:
            self._items.touch(key)
        return cached

    def put(self, item: ProcessedMedia) -> None:
        """Cache ``item`` unless it is larger than the capacity."""
        if len(item.data) <= self._items.capacity:
            self._items.put(item.key, item, len(item.data))

    def clear(self) -> int:
        """Remove all items, and return their number. Running requests keep their items."""
        return len(self._items.clear())

    def find_problems(self) -> list[str]:
        """Return a message for each inconsistency in this cache, for the audit."""
        return self._items.find_problems()
