"""Faults of the caches: keys out of step, pins that stay, entries freed too early or never."""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll_engine import fault_kinds as kinds
from plimsoll_engine.caches.lru import K, LruCache, V
from plimsoll_engine.caches.receiver import Receiver
from plimsoll_engine.core.encoder_cache import EncoderCache
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.core.request import Request
from plimsoll_engine.inject import InjectError, name_of
from plimsoll_engine.ipc import Media, MediaMissing, Submit
from plimsoll_engine.worker.faults.base import Defect


class GhostKeyCache(LruCache[K, V]):
    """Touches keys that it does not hold, and evicts until something went."""

    def touch(self, key: K) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def evict(self, size: int) -> list[tuple[K, V]]:
        evicted: list[tuple[K, V]] = []
        target = self.used - size
        while self.used > target and self._order:
            key = next(iter(self._order))
            if key not in self._data or key in self._pins:
                self._order.move_to_end(key)
                continue
            evicted.append((key, self._remove(key)))
        return evicted


class EvictionLoop(Defect[kinds.EvictionLoop]):
    def __init__(self, fault: kinds.EvictionLoop, engine: Engine) -> None:
        super().__init__(fault, engine)
        self._left = fault.after_requests
        engine.pool.prefix = GhostKeyCache(engine.pool.num_blocks)

    def finished(self, count: int) -> None:
        before, self._left = self._left, self._left - count
        if before > 0 >= self._left:
            cache = self.engine.pool.prefix
            cache.touch(b"evicted by the other side")
            cache.evict(len(cache) + 1)


class PinnedItems(Defect[kinds.PinnedItems]):
    def finished(self, count: int) -> None:
        pool = self.engine.pool
        cached = pool.lookup(list(pool.prefix))
        free = [block for block in cached if block not in pool.references()]
        pool.share(free[-count * self.fault.blocks_per_request :])


class FreedEarly(EncoderCache):
    """Frees an entry in the step that allocates it: the runner is told before it has encoded."""

    def reserve(self, request: Request, count: int) -> tuple[int, list[Media]]:
        if self.lifelong and request.computed:
            return count, []
        count, encode = super().reserve(request, count)
        for media in encode:
            self.used -= self.entries.pop(media.key).tokens
        return count, encode


class HeldBudget(EncoderCache):
    """Lets go of nothing before the prompt is computed."""

    def drop(self, request: Request) -> None:
        if request.computed >= request.num_prompt:
            super().drop(request)


class EncoderFreedEarly(Defect[kinds.EncoderFreedEarly]):
    def __init__(self, fault: kinds.EncoderFreedEarly, engine: Engine) -> None:
        super().__init__(fault, engine)
        _replace_encoder(fault, engine, FreedEarly)


class EncoderBudgetHeld(Defect[kinds.EncoderBudgetHeld]):
    def __init__(self, fault: kinds.EncoderBudgetHeld, engine: Engine) -> None:
        super().__init__(fault, engine)
        _replace_encoder(fault, engine, HeldBudget)


class DeafReceiver(Receiver):
    """Keeps what the sender has let go of."""

    def unpack(self, submit: Submit) -> Submit | MediaMissing:
        return super().unpack(replace(submit, forget=[]))


class MediaKept(Defect[kinds.MediaKept]):
    def __init__(self, fault: kinds.MediaKept, engine: Engine) -> None:
        super().__init__(fault, engine)
        _encoder(fault, engine)
        engine.receiver = DeafReceiver(engine.receiver.capacity)


def _replace_encoder(fault: kinds.Fault, engine: Engine, kind: type[EncoderCache]) -> None:
    sound = _encoder(fault, engine)
    engine.scheduler.encoder = kind(sound.budget, sound.lifelong)


def _encoder(fault: kinds.Fault, engine: Engine) -> EncoderCache:
    if engine.scheduler.encoder is None:
        raise InjectError(
            f"PLIMSOLL_INJECT: {name_of(fault)} needs a model with an encoder (images or sounds)"
        )
    return engine.scheduler.encoder
