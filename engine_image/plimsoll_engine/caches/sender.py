"""Frontend's side of the media cache, which decides what the worker caches.

A lost message would make the two sides differ if both evicted items.
"""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.messages.worker_ipc import Media, Submit, ToWorker, Trim


class MediaCacheSender:
    """Keys and sizes of the items in the worker's media cache of ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self._held: LruCache[bytes, None] = LruCache(capacity)
        self.changes = 0
        self.sent_bytes_total = 0
        self.spared_bytes_total = 0

    def omit_cached_media(self, message: ToWorker) -> ToWorker:
        """Return a copy of ``message`` without media data that the worker has cached.

        The copy also lists the items to remove. Send it before the next call of this method.
        """
        match message:
            case Submit(media=media) if media:
                self.changes += 1
                return self._omit_cached_data(message)
            case Trim():
                self.changes += 1
                self._held.clear()
        return message

    def mark_missing(self, keys: list[bytes]) -> None:
        """Record that the worker lacks the media ``keys``, so that they are sent again."""
        self.changes += 1
        for key in keys:
            self._held.discard(key)

    def list_keys(self) -> set[bytes]:
        """Return the keys of all items that the worker should have."""
        return set(self._held)

    def find_problems(self) -> list[str]:
        """Return an audit message for each inconsistency in this cache."""
        return self._held.find_problems()

    def _omit_cached_data(self, submit: Submit) -> Submit:
        forget: list[bytes] = []
        # Pin the submission's items so that one is not evicted to make room for another.
        pinned = [media.key for media in submit.media if self._pin_if_cached(media.key)]
        media = [self._pin_and_omit_data(item, forget, pinned) for item in submit.media]
        for key in pinned:
            self._held.unpin(key)
        return replace(submit, media=media, forget=forget)

    def _pin_and_omit_data(self, media: Media, forget: list[bytes], pinned: list[bytes]) -> Media:
        assert media.data is not None
        if media.key in self._held:
            self.spared_bytes_total += len(media.data)
            return replace(media, data=None)
        self.sent_bytes_total += len(media.data)
        try:
            evicted = self._held.put(media.key, None, len(media.data))
        except MemoryError:
            return media  # sent without being cached
        forget += [key for key, _ in evicted]
        self._held.pin(media.key)
        pinned.append(media.key)
        return replace(media, keep=True)

    def _pin_if_cached(self, key: bytes) -> bool:
        if key not in self._held:
            return False
        self._held.pin(key)
        return True
