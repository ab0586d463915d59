"""The frontend's cache of processed media: who sends the same image again has it decoded once."""

from __future__ import annotations

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.multimodal.processor import Processed


class ProcessorCache:
    """Tensors as bytes by key, at most ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self._items: LruCache[bytes, Processed] = LruCache(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept items."""
        return self._items.used

    @property
    def capacity(self) -> int:
        """The most bytes that it keeps."""
        return self._items.capacity

    def get(self, key: bytes) -> Processed | None:
        """Return the item of ``key``, now the last to be evicted; None if it is not here."""
        found = self._items.get(key)
        if found is not None:
            self._items.touch(key)
        return found

    def put(self, item: Processed) -> None:
        """Keep ``item``; one that is larger than the whole cache is not kept."""
        if len(item.data) <= self._items.capacity:
            self._items.put(item.key, item, len(item.data))

    def clear(self) -> int:
        """Let go of everything; running requests keep what they need. How many went."""
        return len(self._items.clear())

    def problems(self) -> list[str]:
        """For the audit; nothing on a sound one."""
        return self._items.problems()
