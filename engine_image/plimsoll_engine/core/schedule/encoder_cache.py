"""Record of the media that are encoded, and of the requests that need their encoder outputs.

The scheduler keeps this record, and the runner stores the outputs. Requests with the same image or
audio clip share an entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.messages.worker_ipc import Media


@dataclass(slots=True)
class EncoderCacheEntry:
    """Image or audio clip: the size of its encoder output in tokens, and who needs the output."""

    tokens: int
    # IDs of the requests that need the output.
    holders: set[str] = field(default_factory=set)


class EncoderCache:
    """Record of encoder outputs, with at most ``budget`` tokens in total."""

    def __init__(self, budget: int, is_encoder_decoder: bool = False) -> None:
        if budget < 1:
            raise ValueError(
                f"the budget of the encoder cache must be at least 1 token, got {budget}"
            )
        self.budget = budget
        self.is_encoder_decoder = is_encoder_decoder
        self.used = 0
        self.entries: dict[bytes, EncoderCacheEntry] = {}
        self._freed: list[bytes] = []
        # Keys of media to encode in this step. The runner does not have their outputs yet.
        self._to_encode: set[bytes] = set()

    def get_refusal_reason(self, request: Request) -> str | None:
        """Return the reason why ``request`` can never run on this engine; None if it can."""
        if self.is_encoder_decoder and not request.media:
            return "this model can only transcribe audio: use /v1/audio/transcriptions"
        for media in request.media:
            if media.tokens > self.budget:
                return (
                    f"the {media.kind} takes {media.tokens} tokens of the encoder cache, but "
                    f"the cache has only {self.budget}: increase --encoder-cache-tokens"
                )
        total = sum({media.key: media.tokens for media in request.media}.values())
        if self.is_encoder_decoder and total > self.budget:
            return (
                f"the media of the prompt take {total} tokens of the encoder cache, but the "
                f"cache has only {self.budget}: increase --encoder-cache-tokens"
            )
        return None

    def reserve(self, request: Request, num_tokens: int) -> tuple[int, list[Media]]:
        """Return the number of tokens that can be computed now, and the media to encode first.

        An image or audio clip that does not fit into the budget must wait, with all later tokens.
        """
        start = request.computed
        encode: list[Media] = []
        for media in request.media:
            if not self._is_needed(media, start, start + num_tokens):
                continue
            entry = self.entries.get(media.key)
            if entry is None:
                if self.used + media.tokens > self.budget:
                    return max(0, media.start - start), encode
                entry = self.entries[media.key] = EncoderCacheEntry(media.tokens)
                self.used += media.tokens
                kept = media.key in self._freed  # in this step, so the runner may still have it
                if kept:
                    self._freed.remove(media.key)
                if not kept or media.key in self._to_encode:
                    encode.append(media)
                    self._to_encode.add(media.key)
            entry.holders.add(request.request_id)
        return num_tokens, encode

    def release_computed(self, request: Request) -> None:
        """Release the outputs whose placeholder tokens are all computed."""
        if self.is_encoder_decoder:
            return
        done = request.computed
        # A prompt may contain the same content twice, and the second copy may be partly computed.
        begun = {m.key for m in request.media if m.start < done < m.start + m.length}
        for media in request.media:
            if media.start + media.length <= done and media.key not in begun:
                self._release(request, media.key)

    def release_all(self, request: Request) -> None:
        """Release all outputs of ``request``, which has ended or was preempted."""
        for media in request.media:
            self._release(request, media.key)

    def take_freed_keys(self) -> list[bytes]:
        """Return the keys of the outputs that the runner must free, and forget them.

        Call this before a step is scheduled, and when the engine becomes idle.
        """
        # A step frees outputs before it creates new ones. An output that is created and released in
        # one step is therefore freed in the next.
        freed, self._freed = self._freed, []
        self._to_encode.clear()
        return freed

    def list_known_keys(self) -> set[bytes]:
        """Return the keys of all outputs that the runner may have."""
        return set(self.entries).union(self._freed)

    def find_problems(self, running: Iterable[str]) -> list[str]:
        """Return an audit message for each inconsistency.

        ``running`` are the IDs of the running requests, which alone may have entries.
        """
        found = []
        if dead := self.list_holders().difference(running):
            found.append(
                f"{len(dead)} requests have encoder outputs but are not running, for example"
                f" {min(dead)}"
            )
        if (total := sum(entry.tokens for entry in self.entries.values())) != self.used:
            found.append(
                f"the encoder outputs have {total} tokens, but {self.used} are counted as used"
            )
        if self.used > self.budget:
            found.append(f"encoder outputs use {self.used} tokens, but the budget is {self.budget}")
        if lost := sum(not entry.holders for entry in self.entries.values()):
            found.append(f"{lost} encoder outputs are in the cache, but no request needs them")
        return found

    def list_holders(self) -> set[str]:
        """Return the IDs of all requests that need an output."""
        return {name for entry in self.entries.values() for name in entry.holders}

    def _is_needed(self, media: Media, start: int, stop: int) -> bool:
        if self.is_encoder_decoder:
            return True
        return media.start < stop and media.start + media.length > start

    def _release(self, request: Request, key: bytes) -> None:
        entry = self.entries.get(key)
        if entry is None or request.request_id not in entry.holders:
            return
        entry.holders.remove(request.request_id)
        if not entry.holders:
            del self.entries[key]
            self.used -= entry.tokens
            self._freed.append(key)
