"""The faults of :mod:`plimsoll_engine.inject`, put into a running engine.

Each is a defect that a serving engine really had, at the place where it would be: the request that
stores its bound hasher, the cache that touches a missing key. Nothing here runs without
``PLIMSOLL_INJECT``.
"""

from __future__ import annotations

import gc
import mmap
import time
from functools import partial

import torch

from plimsoll_engine import inject
from plimsoll_engine.caches.lru import K, LruCache, V
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.core.prefix import extend_block_hashes
from plimsoll_engine.core.request import Request
from plimsoll_engine.ipc import Submit


class CyclicRequest(Request):
    """A request that stores its own hasher: request -> partial -> request. Reference counting
    never frees it, nor its payload."""

    def bind(self, block_size: int, payload_bytes: int) -> None:
        # Multiplied, not zero-filled: the pages are written, so they are resident.
        self.payload = bytearray(b"\x01") * payload_bytes
        self.block_hasher = partial(extend_block_hashes, self, block_size)
        self.block_hasher()


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


class Faults:
    """The faults of one worker. Call :meth:`after_step` between steps, :meth:`tick` at any time."""

    def __init__(self, faults: list[inject.Fault], epoch: int, engine: Engine) -> None:
        self._active = [fault for fault in faults if fault.in_epoch(epoch)]
        self._engine = engine
        self._finished = 0
        self._since_freeze = 0
        self._list: list[list[float]] = []
        self._mappings: list[mmap.mmap] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._last_tick = time.monotonic()
        for fault in self._active:
            if isinstance(fault, inject.RequestCycle):
                engine.make_request = partial(
                    _make_cyclic, engine.pool.block_size, fault.payload_bytes
                )
            elif isinstance(fault, inject.EvictionLoop):
                engine.pool.prefix = GhostKeyCache(engine.pool.num_blocks)

    @property
    def names(self) -> list[str]:
        return [inject.name_of(fault) for fault in self._active]

    def after_step(self, finished: int) -> None:
        """``finished`` requests ended in the step."""
        if not finished:
            return
        before, self._finished = self._finished, self._finished + finished
        for fault in self._active:
            match fault:
                case inject.RequestCycle(freeze_every=every):
                    self._freeze(finished, every)
                case inject.AppendList(bytes_per_request=size):
                    # A float is 24 bytes and a list slot 8.
                    self._list += [[float(i) for i in range(size // 32)] for _ in range(finished)]
                case inject.MmapGrowth(bytes_per_request=size) if size:
                    self._map(size * finished)
                case inject.DeviceDict(bytes_per_request=size):
                    self._keep_tensors(size, before)
                case inject.EvictionLoop(after_requests=count) if before < count <= self._finished:
                    cache = self._engine.pool.prefix
                    cache.touch(b"evicted by the other side")
                    cache.evict(len(cache) + 1)

    def tick(self) -> None:
        """The faults that grow with time."""
        now = time.monotonic()
        passed_s, self._last_tick = now - self._last_tick, now
        for fault in self._active:
            if isinstance(fault, inject.MmapGrowth) and fault.bytes_per_s:
                self._map(int(fault.bytes_per_s * passed_s))

    def _freeze(self, finished: int, every: int) -> None:
        self._since_freeze += finished
        if every and self._since_freeze >= every:
            self._since_freeze = 0
            gc.freeze()

    def _map(self, size: int) -> None:
        if size < 1:
            return
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, size, mmap.PAGESIZE):
            mapping[offset] = 1
        self._mappings.append(mapping)

    def _keep_tensors(self, size: int, before: int) -> None:
        device = self._engine.runner.device
        for number in range(before, self._finished):
            self._tensors[number] = torch.ones(max(1, size // 4), device=device)


def _make_cyclic(block_size: int, payload_bytes: int, submit: Submit) -> Request:
    request = CyclicRequest.of(submit)
    assert isinstance(request, CyclicRequest)
    request.bind(block_size, payload_bytes)
    return request
