"""Parts that work in the background, and what becomes of the operator when one fails.

A part that raises begins again, later each time. What each failure means:

==================  ============================================================================
part                a failure
==================  ============================================================================
scrape, breaker     never ends the operator: figures are unknown, and without the circuit breaker
                    each service's own limit holds. Tried again for as long as it takes
reconcile, resync,  ends the operator after :data:`MAX_FAILURES` in a row: nothing works without
canary              them, and a new process may do better
watch               ends the operator at once: kopf retries each watch by itself, and raises only
                    for what a new process has to set up
election            ends the operator at once: another one may work already
==================  ============================================================================

The failure of one service's reconcile is not a part's: the queue tries that service again.
Before the first list of everything, a server that cannot be asked ends the operator, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MAX_FAILURES = 8
"""In a row: some two minutes of back-off."""
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
RECOVERED_S = 300.0
"""A part that ran this long had recovered: its failures are counted from zero."""


class Background:
    """``failures`` counts by part."""

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
        """Run ``part`` again and again, with growing pauses after failures.

        Raises its last exception if it is ``needed`` and failed :data:`MAX_FAILURES` times in a
        row; a part that is not needed never ends this.
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
