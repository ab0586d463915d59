"""Record in the scheduler which media are encoded, and which requests need the outputs.

The runner has the outputs themselves. Requests with the same image or sound share one entry. The
entry exists as long as a request needs it, usually until the placeholder tokens are computed. An
encoder-decoder model attends to the output in every step, so the request needs it until it ends.
Only running requests have entries, so their share of the budget is always returned.

A step frees outputs before it creates new ones. Outputs that step N releases are therefore freed in
step N + 1 or later, or when the engine becomes idle. If an entry were created and freed in the same
step, its output would be created after it was freed, and would never be freed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.messages.worker_ipc import Media


@dataclass(slots=True)
class EncoderCacheEntry:
    """Entry for one image or sound: the size of its output in tokens, and who needs the output."""

    tokens: int
    holders: set[str] = field(default_factory=set)
    """IDs of the requests that need the output."""


class EncoderCache:
    """Record of encoder outputs.

    All entries together have at most ``budget`` tokens. ``lifelong`` means that a request needs its
    outputs until it ends.
    """

    def __init__(self, budget: int, lifelong: bool = False) -> None:
        if budget < 1:
            raise ValueError(
                f"encoder cache budget {budget} is too small: it must be at least 1 token"
            )
        self.budget = budget
        self.lifelong = lifelong
        self.used = 0
        self.entries: dict[bytes, EncoderCacheEntry] = {}
        self._freed: list[bytes] = []
        self._ordered: set[bytes] = set()
        """Keys to encode in this step. The runner does not have their outputs yet."""

    def find_refusal(self, request: Request) -> str | None:
        """Return the reason why ``request`` can never run in this engine; None if it can."""
        if self.lifelong and not request.media:
            return "this model can only transcribe audio: use /v1/audio/transcriptions"
        for media in request.media:
            if media.tokens > self.budget:
                return (
                    f"the {media.kind} takes {media.tokens} tokens of the encoder cache, but the"
                    f" cache has {self.budget}: increase --encoder-cache-tokens"
                )
        total = sum({media.key: media.tokens for media in request.media}.values())
        if self.lifelong and total > self.budget:
            return (
                f"the prompt's media take {total} tokens of the encoder cache, but the cache has"
                f" {self.budget}: increase --encoder-cache-tokens"
            )
        return None

    def reserve(self, request: Request, count: int) -> tuple[int, list[Media]]:
        """Return how many of ``count`` tokens can be computed, and the media to encode first.

        If an image or sound does not fit into the budget, only the tokens before it can be
        computed.
        """
        start = request.computed
        encode: list[Media] = []
        for media in request.media:
            if not self._is_needed(media, start, start + count):
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
                if not kept or media.key in self._ordered:
                    encode.append(media)
                    self._ordered.add(media.key)
            entry.holders.add(request.request_id)
        return count, encode

    def release_computed(self, request: Request) -> None:
        """Release the outputs whose placeholder tokens are all computed."""
        if self.lifelong:
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
        """Return the keys of outputs that the runner must free, and forget these keys.

        Call this before a step is scheduled, and when the engine becomes idle.
        """
        freed, self._freed = self._freed, []
        self._ordered.clear()
        return freed

    def list_known_keys(self) -> set[bytes]:
        """Return the keys of all outputs that the runner may have now."""
        return set(self.entries).union(self._freed)

    def find_problems(self, running: Iterable[str]) -> list[str]:
        """Return a message for each inconsistency, for the audit.

        ``running`` are the IDs of all running requests. Only these may have entries.
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
            found.append(f"no request needs {lost} of the encoder outputs")
        return found

    def list_holders(self) -> set[str]:
        """Return the IDs of all requests that need an output."""
        return {name for entry in self.entries.values() for name in entry.holders}

    def _is_needed(self, media: Media, start: int, stop: int) -> bool:
        if self.lifelong:
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
