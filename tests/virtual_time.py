"""An event loop with virtual time: a test that waits for an hour ends at once.

Sleeps, timeouts and ``call_later`` are asyncio's own; only the clock is virtual.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "every task waits for another one"
            self.now += max(0.0, timeout)
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, from time 0 on."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


def clock() -> Callable[[], float]:
    """The clock of the loop that runs."""
    return asyncio.get_running_loop().time
