"""A token bucket for requests, so that one operator cannot crowd an API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class RateLimit:
    """At most ``rate`` requests a second in the long run, and ``burst`` at once.

    Waiters are let through in the order in which they came: each books its turn when it asks.
    """

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

    async def turn(self) -> None:
        """Wait until the caller may send its request."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1.0
        if self._tokens < 0.0:
            delay = -self._tokens / self._rate
            self.waited_s += delay
            await self._sleep(delay)
