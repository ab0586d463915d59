"""Faults of caches: inconsistent keys, leaked pins, and entries freed too early or never."""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll_engine.caches.lru import K, LruCache, V
from plimsoll_engine.caches.receiver import MediaCacheReceiver
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.grammar.grammars import (
    MIN_COMPILED_BYTES,
    MIN_COMPILED_BYTES_PER_CHARACTER,
    GrammarCompiler,
    GrammarError,
)
from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.messages.worker_ipc import Grammar, Media, MissingMedia, Submit
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, make_inject_error
from plimsoll_faults.tampering import replace_methods

# With bound=low, the ledger declares the capacity of the cache divided by this.
LOW_BOUND_DIVISOR = 4


class PhantomKeyCache(LruCache[K, V]):
    """Cache whose eviction loops forever after a missing key was touched."""

    def touch(self, key: K) -> None:
        """Add ``key`` to the usage order, even if it has no value."""
        self._order[key] = None
        self._order.move_to_end(key)

    def evict(self, size: int) -> list[tuple[K, V]]:
        """Evict entries until ``size`` bytes are free. Loop forever if none has a value."""
        evicted: list[tuple[K, V]] = []
        target = self.used - size
        while self.used > target and self._order:
            key = next(iter(self._order))
            if key not in self._data or key in self._pins:
                self._order.move_to_end(key)
                continue
            evicted.append((key, self._remove(key)))
        return evicted


class EvictionLoopDefect(Defect[kinds.EvictionLoop]):
    """Add a key without a value to the prefix cache after some requests."""

    def __init__(self, fault: kinds.EvictionLoop, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self._requests_left = fault.after_requests
        engine.pool.prefix = PhantomKeyCache(engine.pool.num_blocks)

    def after_requests(self, num_requests: int) -> None:
        """Start an endless eviction once ``fault.after_requests`` requests have ended."""
        before, self._requests_left = self._requests_left, self._requests_left - num_requests
        if before > 0 >= self._requests_left:
            cache = self.engine.pool.prefix
            cache.touch(b"evicted by the other side")
            cache.evict(len(cache) + 1)


class PinnedItemsDefect(Defect[kinds.PinnedItems]):
    """Keep references to cached blocks and never release them."""

    def after_requests(self, num_requests: int) -> None:
        """Pin some blocks for each finished request."""
        pool = self.engine.pool
        cached = pool.find_cached_prefix(list(pool.prefix))
        free = [block for block in cached if block not in pool.count_references()]
        pool.add_references(free[-num_requests * self.fault.blocks_per_request :])


class EarlyFreeCache(EncoderCache):
    """Encoder cache that frees an entry in the step that reserves it, before it is encoded."""

    def reserve(self, request: Request, num_tokens: int) -> tuple[int, list[Media]]:
        """Reserve entries, and free them again in the same step."""
        if self.is_encoder_decoder and request.computed:
            return num_tokens, []
        num_tokens, encode = super().reserve(request, num_tokens)
        for media in encode:
            self.used -= self.entries.pop(media.key).tokens
        return num_tokens, encode


class BudgetLeakingCache(EncoderCache):
    """Encoder cache that does not release requests that end before their prompt is computed."""

    def release_all(self, request: Request) -> None:
        """Release the budget of a request, but only if its prompt was computed."""
        if request.computed >= request.num_prompt:
            super().release_all(request)


class EncoderEarlyFreeDefect(Defect[kinds.EncoderEarlyFree]):
    """Replace the encoder cache with one that frees entries too early."""

    def __init__(self, fault: kinds.EncoderEarlyFree, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _replace_encoder_cache(fault, engine, EarlyFreeCache)


class EncoderBudgetLeakDefect(Defect[kinds.EncoderBudgetLeak]):
    """Replace the encoder cache with one that keeps the budget of aborted requests."""

    def __init__(self, fault: kinds.EncoderBudgetLeak, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _replace_encoder_cache(fault, engine, BudgetLeakingCache)


class StaleReceiver(MediaCacheReceiver):
    """Receiver cache that keeps media that the sender has dropped."""

    def restore_cached_media(self, submit: Submit) -> Submit | MissingMedia:
        """Unpack a message, but keep the media that the sender has dropped."""
        return super().restore_cached_media(replace(submit, forget=[]))


class MediaRetentionDefect(Defect[kinds.MediaRetention]):
    """Replace the worker's receiver cache with one that never drops media."""

    def __init__(self, fault: kinds.MediaRetention, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _require_encoder_cache(fault, engine)
        engine.receiver = StaleReceiver(engine.receiver.capacity)


class LowBoundCompiler(GrammarCompiler):
    """Grammar compiler whose cache declares a bound that is too low."""

    @property
    def bytes_bound(self) -> int:
        """Declared bound in bytes, which is below the capacity."""
        return self._cache.capacity // LOW_BOUND_DIVISOR + self._vocabulary_bytes


class CacheFillDefect(Defect[kinds.CacheFill]):
    """Fill the grammar cache up to its bound, as clients do that all use different grammars."""

    def __init__(self, fault: kinds.CacheFill, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self._num_grammars = 0
        try:
            self.after_requests(1)
        except GrammarError as error:
            raise make_inject_error(
                fault, f"needs structured output, which is not available: {error}"
            ) from None
        if fault.bound == "low":
            replace_methods(engine.grammars, LowBoundCompiler)

    def after_requests(self, num_requests: int) -> None:
        """Put a new grammar into the grammar cache for each request."""
        grammars = self.engine.grammars
        for _ in range(num_requests):
            grammar = Grammar("regex", f"{self._num_grammars}".ljust(self.fault.text_bytes, "a"))
            self._num_grammars += 1
            size = MIN_COMPILED_BYTES + MIN_COMPILED_BYTES_PER_CHARACTER * len(grammar.text)
            compiled = grammars.compile(grammar)
            with grammars._lock:
                grammars._cache.put((grammar.kind, grammar.text), compiled, size)


def _replace_encoder_cache(
    fault: kinds.Fault, engine: EngineCore, cache_type: type[EncoderCache]
) -> None:
    original = _require_encoder_cache(fault, engine)
    engine.scheduler.encoder = cache_type(original.budget, original.is_encoder_decoder)


def _require_encoder_cache(fault: kinds.Fault, engine: EngineCore) -> EncoderCache:
    if engine.scheduler.encoder is None:
        raise make_inject_error(fault, "needs a model with an encoder for images or audio")
    return engine.scheduler.encoder
