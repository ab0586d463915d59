"""The frontend's half of the receiver cache: it knows what the worker holds without asking.

The worker keeps the tensors of images and sounds, so that one that many requests share is sent
once. What it keeps and lets go is decided here alone, when a submission is written to the socket:
the socket delivers all or nothing and in order, so both sides hold the same keys whenever nothing
is on the way. (Where each side evicts for itself, one lost message leaves them apart for ever.)
A sender lives as long as its connection: the next worker begins with an empty cache and a new one.
"""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll_engine.caches.lru import LruCache
from plimsoll_engine.messages.worker_ipc import Media, Submit, ToWorker, Trim


class Sender:
    """``capacity`` is the bytes of the worker's receiver cache."""

    def __init__(self, capacity: int) -> None:
        self._held: LruCache[bytes, None] = LruCache(capacity)
        self.changes = 0
        """Counts every change; two equal readings mean that nothing happened in between."""
        self.sent_bytes_total = 0
        self.spared_bytes_total = 0

    def pack(self, message: ToWorker) -> ToWorker:
        """Return ``message`` as it is to be written, now and whatever happens.

        It lacks the data that the worker has, and orders it to let go of what has to make room.
        """
        match message:
            case Submit(media=media) if media:
                self.changes += 1
                return self._pack(message)
            case Trim():
                self.changes += 1
                self._held.clear()
        return message

    def lost(self, keys: list[bytes]) -> None:
        """Send these again: the worker says that it lacks them."""
        self.changes += 1
        for key in keys:
            self._held.discard(key)

    def keys(self) -> set[bytes]:
        """Return the keys that the worker holds by this account."""
        return set(self._held)

    def problems(self) -> list[str]:
        """For the audit; nothing on a sound one."""
        return self._held.problems()

    def _pack(self, submit: Submit) -> Submit:
        forget: list[bytes] = []
        # Pinned, so that an item of this submission never makes room for another one of it.
        pinned = [media.key for media in submit.media if self._pin(media.key)]
        media = [self._one(item, forget, pinned) for item in submit.media]
        for key in pinned:
            self._held.unpin(key)
        return replace(submit, media=media, forget=forget)

    def _one(self, media: Media, forget: list[bytes], pinned: list[bytes]) -> Media:
        assert media.data is not None
        if media.key in self._held:
            self.spared_bytes_total += len(media.data)
            return replace(media, data=None)
        self.sent_bytes_total += len(media.data)
        try:
            evicted = self._held.put(media.key, None, len(media.data))
        except MemoryError:
            return media  # sent for this request alone
        forget += [key for key, _ in evicted]
        self._held.pin(media.key)
        pinned.append(media.key)
        return replace(media, keep=True)

    def _pin(self, key: bytes) -> bool:
        if key not in self._held:
            return False
        self._held.pin(key)
        return True
