"""Worker's side of the media cache, which stores and removes items as the sender instructs."""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll_engine.messages.worker_ipc import Media, MissingMedia, Submit


class MediaCacheReceiver:
    """Cache of media tensors. The sender keeps their total size within ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self._held: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def restore_cached_media(self, submit: Submit) -> Submit | MissingMedia:
        """Apply the cache changes in ``submit``, and return it with the data of all media.

        If data is missing, return a message with the keys of these media instead.
        """
        for key in submit.forget:
            self._remove(key)
        for media in submit.media:
            if media.keep and media.data is not None:
                self._remove(media.key)
                self._held[media.key] = media.data
                self.bytes += len(media.data)
        missing = [m.key for m in submit.media if m.data is None and m.key not in self._held]
        if missing:
            return MissingMedia(submit.request_id, submit.attempt, missing)
        return replace(
            submit, media=[self._restore_data(media) for media in submit.media], forget=[]
        )

    def _restore_data(self, media: Media) -> Media:
        return replace(media, data=self._held[media.key]) if media.data is None else media

    def list_keys(self) -> list[bytes]:
        """Return the sorted keys of all items."""
        return sorted(self._held)

    def clear(self) -> int:
        """Remove all items and return their number."""
        count = len(self._held)
        self._held.clear()
        self.bytes = 0
        return count

    def find_problems(self) -> list[str]:
        """Return an audit message for each inconsistency in this cache."""
        total = sum(map(len, self._held.values()))
        if total != self.bytes:
            return [f"the items have {total} bytes in total, but {self.bytes} are recorded"]
        return []

    def _remove(self, key: bytes) -> None:
        data = self._held.pop(key, None)
        if data is not None:
            self.bytes -= len(data)
