"""Background parts of the operator, and what a failure of each means.

A failed part is restarted after a growing delay.

==================  ============================================================================
part                a failure
==================  ============================================================================
scrape, breaker     never ends the operator: figures are unknown, and without the circuit breaker
                    each service's own limit holds. Retried without a limit
reconcile, resync,  ends the operator after :data:`MAX_FAILURES` in a row: nothing works without
canary              them, and a new process may recover
watch               ends the operator at once: kopf retries each watch itself, and raises only
                    for what a new process has to set up
election            ends the operator at once: another one may lead already
==================  ============================================================================

A failed reconcile of one service is not a failure of the part: the queue retries that service.
Before the first full list, an API server that does not answer ends the operator, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MAX_FAILURES = 8
"""Consecutive failures that end the operator: about two minutes of back-off."""
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
RECOVERED_S = 300.0
"""Seconds of uninterrupted running after which a part's failures are counted from zero."""


class Background:
    """Runs parts of the operator in the background, and counts the failures of each."""

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep, self._clock = sleep, clock
        self.failures: Counter[str] = Counter()

    async def keep(
        self, name: str, part: Callable[[], Awaitable[None]], needed: bool = True
    ) -> None:
        """Run ``part`` repeatedly, with a growing delay after failures.

        Raises its last exception if it is ``needed`` and failed :data:`MAX_FAILURES` times in a
        row. A part that is not needed is retried without a limit.
        """
        row = 0
        while True:
            began = self._clock()
            try:
                await part()
                raise RuntimeError("it ended unexpectedly")
            except Exception as error:
                row = 1 if self._clock() - began >= RECOVERED_S else row + 1
                self.failures[name] += 1
                if needed and row >= MAX_FAILURES:
                    log.critical("%s failed %d times in a row: %r", name, row, error)
                    raise
                delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(row - 1, 10))
                log.error("%s failed; retrying in %.0f s", name, delay, exc_info=error)
            await self._sleep(delay)
