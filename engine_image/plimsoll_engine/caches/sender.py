"""Frontend's side of the media cache. It always knows which items the worker has cached.

The worker caches the tensors of images and audio clips, so that media of many requests are sent
only once. With each submission, the sender decides which items the worker keeps. The socket
delivers messages completely and in order, so both sides have the same keys when no message is in
flight. (If both sides evicted items, one lost message would make them differ.) Each connection has
its own sender, and each worker starts with an empty cache.
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
        """Number of changes to the cache so far."""
        self.sent_bytes_total = 0
        self.spared_bytes_total = 0

    def omit_cached_media(self, message: ToWorker) -> ToWorker:
        """Return a copy of ``message`` without the data of media that the worker has cached.

        The copy also lists the items that the worker must remove. Send it before the next call.
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
        """Record that the worker lacks the data for ``keys``, so that the data is sent again."""
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
