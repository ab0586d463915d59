"""A queue of keys: each waits once, runs once at a time, and backs off by itself when it fails."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 120.0


def backoff(failures: int, jitter: float) -> float:
    """Seconds until the next try after ``failures`` in a row; ``jitter`` in [0, 1) spreads them."""
    full = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 30))
    return full * (0.5 + 0.5 * jitter)


class WorkQueue(Generic[K]):
    """A key that is added while it is being handled is handled once more afterwards."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._waiting: set[K] = set()
        self._running: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: Counter[K] = Counter()
        self.handled = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Handles ``key`` as soon as a worker is free. Must be called on the event loop."""
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_later(self, key: K, delay_s: float) -> None:
        """Handles ``key`` after ``delay_s``, unless it is added before."""
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self.add, key)

    async def run(self, handle: Callable[[K], Awaitable[None]]) -> None:
        """Works until cancelled; what is being handled then is cancelled with it.

        ``handle`` may raise anything: the key comes again later.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._work(handle))
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def _work(self, handle: Callable[[K], Awaitable[None]]) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._running.add(key)
            try:
                await handle(key)
            except Exception as error:  # one service's failure is its own
                self.failed += 1
                self._failures[key] += 1
                delay = backoff(self._failures[key], random.random())
                log.warning("%s: %s; again in %.1f s", key, error or repr(error), delay)
                log.debug("", exc_info=True)
                self.add_later(key, delay)
            else:
                del self._failures[key]
            finally:
                self.handled += 1
                self._running.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)
