"""Runs a coroutine until it ends or a person stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Coroutine[Any, Any, None]) -> bool:
    """False when a signal stopped it. Each signal cancels once: the first lets ``main`` stop in
    order, the second, which meets that stop, is for who does not want to wait."""

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
    """Runs them beside the block and ends them with it. An error of one of them is raised when the
    block has ended well: what they do is to show, not to decide."""
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
