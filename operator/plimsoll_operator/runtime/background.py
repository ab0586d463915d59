"""Run the operator's background tasks, and stop the operator if a necessary task keeps failing.

A failed task is restarted with an increasing delay.

==================  ============================================================================
task                effect of a failure
==================  ============================================================================
scrape, breaker     never stops the operator. Without scrapes, values are unknown; without the
                    circuit breaker, each service's own limit applies
reconcile, resync,  stops the operator after :data:`MAX_FAILURES` in a row, because nothing works
canary              without these tasks, and a new process may recover
watch               stops the operator at once, because kopf retries each watch itself, and only
                    raises errors that a new process may fix
election            stops the operator at once, because another operator may already lead
==================  ============================================================================

A failed reconcile of one service is not a failure of the task: the queue retries the service.
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
"""Seconds for which a task must run before its failure count is reset."""


class BackgroundTasks:
    """Runner of the operator's background tasks that counts the failures of each task."""

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep, self._clock = sleep, clock
        self.failures: Counter[str] = Counter()

    async def run_forever(
        self, name: str, run_task: Callable[[], Awaitable[None]], is_required: bool = True
    ) -> None:
        """Run ``run_task`` forever, with an increasing delay after each failure.

        If ``is_required``, raise the task's exception after :data:`MAX_FAILURES` failures in a row.
        """
        consecutive = 0
        self.failures[name] += 0  # Prometheus cannot see an increase in the first value of a series
        while True:
            started = self._clock()
            try:
                await run_task()
                raise RuntimeError(f"background task {name} ended unexpectedly")
            except Exception as error:
                consecutive = (
                    1 if self._clock() - started >= MIN_RUN_FOR_FAILURE_RESET_S else consecutive + 1
                )
                self.failures[name] += 1
                if is_required and consecutive >= MAX_FAILURES:
                    log.critical(
                        "background task %s failed %d times in a row: %r",
                        name,
                        consecutive,
                        error,
                    )
                    raise
                delay = min(
                    MAX_RETRY_DELAY_S, FIRST_RETRY_DELAY_S * 2.0 ** min(consecutive - 1, 10)
                )
                log.error(
                    "background task %s failed; restarting it in %.0f s",
                    name,
                    delay,
                    exc_info=error,
                )
            await self._sleep(delay)
