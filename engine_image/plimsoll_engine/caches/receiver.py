"""The worker's half: it holds what the sender says, and lets go when the sender says so.

There is no order and no eviction of its own, so there is nothing to fall out of step.
"""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll_engine.messages.worker_ipc import Media, MediaMissing, Submit


class Receiver:
    """The tensors of images and sounds as bytes, by key. ``capacity`` (bytes) is the sender's."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self._held: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def unpack(self, submit: Submit) -> Submit | MediaMissing:
        """``submit`` with the data of each of its media, or what is missing for it."""
        for key in submit.forget:
            self._drop(key)
        for media in submit.media:
            if media.keep and media.data is not None:
                self._drop(media.key)
                self._held[media.key] = media.data
                self.bytes += len(media.data)
        missing = [m.key for m in submit.media if m.data is None and m.key not in self._held]
        if missing:
            return MediaMissing(submit.request_id, submit.attempt, missing)
        return replace(submit, media=[self._whole(media) for media in submit.media], forget=[])

    def _whole(self, media: Media) -> Media:
        return replace(media, data=self._held[media.key]) if media.data is None else media

    def keys(self) -> list[bytes]:
        """Return the keys that are held, sorted, for the audit against the sender's."""
        return sorted(self._held)

    def clear(self) -> int:
        """Let go of everything; requests that were begun keep what they need. How many went."""
        count = len(self._held)
        self._held.clear()
        self.bytes = 0
        return count

    def problems(self) -> list[str]:
        """Return what is wrong with this cache, for the audit; nothing on a sound one."""
        total = sum(map(len, self._held.values()))
        if total != self.bytes:
            return [f"the items have {total} bytes, {self.bytes} are counted"]
        return []

    def _drop(self, key: bytes) -> None:
        data = self._held.pop(key, None)
        if data is not None:
            self.bytes -= len(data)
