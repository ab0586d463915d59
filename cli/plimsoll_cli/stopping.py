"""Runs a coroutine until it ends or a person stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Coroutine[Any, Any, None]) -> bool:
    """Run ``main`` until it ends or a signal stops it; return False if a signal did.

    Each signal cancels once: the first lets ``main`` stop in order, and the second cuts that stop
    short for a person who does not want to wait.
    """

    async def guarded() -> bool:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            await task
        except asyncio.CancelledError:
            if not stopped:
                raise
        return not stopped

    return asyncio.run(guarded())


@contextlib.asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block and end them with it.

    An error of one of them is raised when the block has ended well: they only show things and
    decide nothing.
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
