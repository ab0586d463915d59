"""Work queue for reconciles, and rate limit for API requests."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 120.0
MAX_OUTAGE_BACKOFF_S = 30.0
"""Maximum delay while the API server does not respond, as in client-go's reflectors."""


def compute_backoff_s(failures: int, jitter: float, outage: bool = False) -> float:
    """Return the seconds until the next attempt after ``failures`` consecutive failures.

    The delay is at most 120 s, or 30 s during an ``outage`` of the API server. ``jitter`` in [0, 1)
    shortens it by up to half.
    """
    longest = MAX_OUTAGE_BACKOFF_S if outage else MAX_BACKOFF_S
    full = min(longest, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 30))
    return full * (0.5 + 0.5 * jitter)


class WorkQueue(Generic[K]):
    """Queue of keys; a key that is added while it is being handled is handled again."""

    # ``on_done`` is called after each key with its wait and duration in seconds, and the error.
    def __init__(
        self,
        workers: int,
        on_done: Callable[[float, float, Exception | None], None] = lambda *_: None,
        is_outage: Callable[[Exception], bool] = lambda _: False,
    ) -> None:
        self._workers, self._done, self._is_outage = workers, on_done, is_outage
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._waiting: dict[K, float] = {}
        self._running: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: Counter[K] = Counter()
        self.handled = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Queue ``key``; call this method only on the event loop."""
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting[key] = time.monotonic()
            self._ready.put_nowait(key)

    def add_later(self, key: K, delay_s: float) -> None:
        """Queue ``key`` after ``delay_s`` seconds, unless it is added or scheduled earlier.

        The recheck that a reconcile asks for is thus not lost if the reconcile then fails. The
        backoff stays effective: such a key runs as often as its rechecks, at most, as if it had not
        failed, and its failures are counted on.
        """
        loop = asyncio.get_running_loop()
        timer, at = self._timers.get(key), loop.time() + delay_s
        if timer:
            if timer.when() <= at:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(at, self._add_scheduled, key)

    def _add_scheduled(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def is_idle(self) -> bool:
        """Report whether no key is queued, running or scheduled."""
        return not (self._waiting or self._running or self._timers)

    async def run(self, handle: Callable[[K], Awaitable[None]]) -> None:
        """Handle keys until cancelled; retry a key later if ``handle`` raises an exception.

        ``run`` can be called again, and then starts with the keys that were running or scheduled.
        """
        for key in list(self._timers):
            self.add(key)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._run_worker(handle))
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def _run_worker(self, handle: Callable[[K], Awaitable[None]]) -> None:
        while True:
            key = await self._ready.get()
            queued_at = self._waiting.pop(key)
            self._running.add(key)
            started = time.monotonic()
            failure: Exception | None = None
            try:
                await handle(key)
            except asyncio.CancelledError:
                self._again.add(key)
                raise
            except Exception as error:  # the failure of one key must not stop the worker
                failure = error
                self.failed += 1
                self._failures[key] += 1
                outage = self._is_outage(error)
                delay = compute_backoff_s(self._failures[key], random.random(), outage)
                log.warning(
                    "%s: failed to reconcile: %s; retrying in %.1f s",
                    key,
                    str(error) or repr(error),
                    delay,
                )
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
                self._done(started - queued_at, time.monotonic() - started, failure)
            # A reconcile without requests never yields: a thousand of them would delay probes,
            # watches and the renewal of the leader's Lease.
            await asyncio.sleep(0)


class RateLimit:
    """Rate limiter for requests: ``rate`` per second on average, with bursts of up to ``burst``."""

    def __init__(
        self,
        rate: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._burst, self._clock, self._sleep = rate, float(burst), clock, sleep
        self._tokens, self._at = float(burst), clock()
        self.waited_s = 0.0

    async def acquire(self) -> None:
        """Wait until the caller may send its request."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1.0
        if self._tokens < 0.0:
            delay = -self._tokens / self._rate
            self.waited_s += delay
            await self._sleep(delay)
