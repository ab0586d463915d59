"""Run a coroutine until it ends or a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signal(main: Coroutine[Any, Any, None]) -> bool:
    """Run ``main``; return True if it ends by itself, and False if a signal stops it.

    The first signal cancels ``main``, which may then clean up. A second signal cancels the cleanup.
    """

    async def run_guarded() -> bool:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            await task
        except asyncio.CancelledError:
            if not stopped:
                raise
        return not stopped

    return asyncio.run(run_guarded())


@contextlib.asynccontextmanager
async def run_in_background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Return a context in which ``coroutines`` run; they are cancelled at its end.

    If a coroutine failed, its error is raised at the end of the context.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
