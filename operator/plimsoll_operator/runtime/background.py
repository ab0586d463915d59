"""Run background parts of the operator, and decide whether a failure of one stops it.

A failed part is restarted with an increasing delay.

==================  ============================================================================
part                a failure
==================  ============================================================================
scrape, breaker     never stops the operator: values are unknown, and without the circuit breaker
                    each service's own limit applies. Retried without a limit
reconcile, resync,  stops the operator after :data:`MAX_FAILURES` in a row: nothing works without
canary              them, and a new process may recover
watch               stops the operator at once: kopf retries each watch itself, and only raises
                    errors that a new process may fix
election            stops the operator at once: another one may already lead
==================  ============================================================================

A failed reconcile of one service is not a failure of the part: the queue retries that service.
Until the first full list, an unresponsive API server also stops the operator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MAX_FAILURES = 8
"""Number of consecutive failures that stop the operator, after about two minutes of back-off."""
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 60.0
MIN_RUN_FOR_FAILURE_RESET_S = 300.0
"""Seconds for which a part must run without a failure for its failure count to be reset."""


class Background:
    """Runner of the operator's background parts. It counts the failures of each part."""

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep, self._clock = sleep, clock
        self.failures: Counter[str] = Counter()

    async def keep_running(
        self, name: str, part: Callable[[], Awaitable[None]], needed: bool = True
    ) -> None:
        """Run ``part`` again and again, with an increasing delay after failures.

        If the part is ``needed`` and has failed :data:`MAX_FAILURES` times in a row, its last
        exception is raised. Otherwise it is retried without a limit.
        """
        consecutive = 0
        while True:
            started = self._clock()
            try:
                await part()
                raise RuntimeError(f"the background task {name} ended unexpectedly")
            except Exception as error:
                consecutive = (
                    1 if self._clock() - started >= MIN_RUN_FOR_FAILURE_RESET_S else consecutive + 1
                )
                self.failures[name] += 1
                if needed and consecutive >= MAX_FAILURES:
                    log.critical(
                        "the background task %s failed %d times in a row: %r",
                        name,
                        consecutive,
                        error,
                    )
                    raise
                delay = min(
                    MAX_RETRY_DELAY_S, FIRST_RETRY_DELAY_S * 2.0 ** min(consecutive - 1, 10)
                )
                log.error(
                    "the background task %s failed; retrying in %.0f s", name, delay, exc_info=error
                )
            await self._sleep(delay)
