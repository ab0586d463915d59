"""Faults of the caches: keys out of step, pins that stay, entries freed too early or never."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from plimsoll_engine.caches.lru import K, LruCache, V
from plimsoll_engine.caches.receiver import Receiver
from plimsoll_engine.core.encoder_cache import EncoderCache
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.grammar import BASE_BYTES, BYTES_PER_CHARACTER, GrammarError
from plimsoll_engine.core.request import Request
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.worker_ipc import Grammar, Media, MediaMissing, Submit
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, impossible

LOW = 4
"""The part of the cache's capacity that a low bound has room for."""


class GhostKeyCache(LruCache[K, V]):
    """Touches keys that it does not hold, and evicts until something went."""

    def touch(self, key: K) -> None:
        """Enter ``key`` into the order of use, also where it has no value: the fault."""
        self._order[key] = None
        self._order.move_to_end(key)

    def evict(self, size: int) -> list[tuple[K, V]]:
        """Evict ``size`` bytes. A key without a value frees nothing, so the loop need not end."""
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
    """Gives the prefix cache a ghost key after so many requests."""

    def __init__(self, fault: kinds.EvictionLoop, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self._left = fault.after_requests
        engine.pool.prefix = GhostKeyCache(engine.pool.num_blocks)

    def finished(self, count: int) -> None:
        """Count requests, and put the ghost in when their number is reached."""
        before, self._left = self._left, self._left - count
        if before > 0 >= self._left:
            cache = self.engine.pool.prefix
            cache.touch(b"evicted by the other side")
            cache.evict(len(cache) + 1)


class PinnedItemsDefect(Defect[kinds.PinnedItems]):
    """Takes references to cached blocks that nobody gives back."""

    def finished(self, count: int) -> None:
        """Pin some blocks for each request that ended."""
        pool = self.engine.pool
        cached = pool.lookup(list(pool.prefix))
        free = [block for block in cached if block not in pool.references()]
        pool.share(free[-count * self.fault.blocks_per_request :])


class FreedEarly(EncoderCache):
    """Frees an entry in the step that allocates it: the runner is told before it has encoded."""

    def reserve(self, request: Request, count: int) -> tuple[int, list[Media]]:
        """Reserve as the sound cache does, and free the entries in the same step."""
        if self.lifelong and request.computed:
            return count, []
        count, encode = super().reserve(request, count)
        for media in encode:
            self.used -= self.entries.pop(media.key).tokens
        return count, encode


class HeldBudget(EncoderCache):
    """Lets go of nothing before the prompt is computed."""

    def drop(self, request: Request) -> None:
        """Give the budget back only after the prompt was computed.

        An abort before that keeps it.
        """
        if request.computed >= request.num_prompt:
            super().drop(request)


class EncoderFreedEarlyDefect(Defect[kinds.EncoderFreedEarly]):
    """Replaces the encoder cache with one that frees too early."""

    def __init__(self, fault: kinds.EncoderFreedEarly, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _replace_encoder(fault, engine, FreedEarly)


class EncoderBudgetHeldDefect(Defect[kinds.EncoderBudgetHeld]):
    """Replaces the encoder cache with one that keeps the budget of aborted requests."""

    def __init__(self, fault: kinds.EncoderBudgetHeld, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _replace_encoder(fault, engine, HeldBudget)


class StaleReceiver(Receiver):
    """Keeps what the sender has let go of."""

    def unpack(self, submit: Submit) -> Submit | MediaMissing:
        """Unpack as the sound one does, but keep what the sender says to forget."""
        return super().unpack(replace(submit, forget=[]))


class MediaKeptDefect(Defect[kinds.MediaKept]):
    """Replaces the worker's receiver of media with one that forgets nothing."""

    def __init__(self, fault: kinds.MediaKept, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _encoder(fault, engine)
        engine.receiver = StaleReceiver(engine.receiver.capacity)


class CacheFillsDefect(Defect[kinds.CacheFills]):
    """Fills the cache by its own ``put``, which evicts as ever.

    It stands for requests with grammars of their own, without the clients.
    """

    def __init__(self, fault: kinds.CacheFills, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self._made = 0
        try:
            self.finished(1)
        except GrammarError as error:
            raise impossible(fault, f"needs grammars: {error}") from None

    def declare(self, ledger: Ledger) -> None:
        """Declare a bound that is too low, if the fault says so."""
        if self.fault.bound == "low":
            grammars = self.engine.grammars
            low = grammars._cache.capacity // LOW + grammars._vocabulary_bytes
            true = ledger._owners["grammar_cache"]
            ledger._owners["grammar_cache"] = dataclasses.replace(true, bound=low)

    def finished(self, count: int) -> None:
        """Compile a grammar of its own for each request: the cache fills to its bound."""
        grammars = self.engine.grammars
        for _ in range(count):
            grammar = Grammar("regex", f"{self._made}".ljust(self.fault.text_bytes, "a"))
            self._made += 1
            size = BASE_BYTES + BYTES_PER_CHARACTER * len(grammar.text)
            compiled = grammars.compile(grammar)
            with grammars._lock:
                grammars._cache.put((grammar.kind, grammar.text), compiled, size)


def _replace_encoder(fault: kinds.Fault, engine: EngineCore, kind: type[EncoderCache]) -> None:
    sound = _encoder(fault, engine)
    engine.scheduler.encoder = kind(sound.budget, sound.lifelong)


def _encoder(fault: kinds.Fault, engine: EngineCore) -> EncoderCache:
    if engine.scheduler.encoder is None:
        raise impossible(fault, "needs a model with an encoder (images or sounds)")
    return engine.scheduler.encoder
