"""What the worker's loop did lately, so that a Stop can say what it had to wait for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

KEPT = 32
"""Spans: some turns of the loop."""


class Activity:
    """One thread's spans, one after the other: each ends where the next one begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=KEPT)
        self._since = clock()

    def begin(self) -> None:
        """Leave out what came before: the loop waited."""
        self._since = self._clock()

    def did(self, name: str) -> None:
        """Say what was done since the last call."""
        now = self._clock()
        self._spans.append((name, self._since, now))
        self._since = now

    def since(self, moment: float) -> dict[str, float]:
        """Return the seconds of each activity since then, the first one first."""
        found: dict[str, float] = {}
        for name, begun, ended in self._spans:
            took = ended - max(begun, moment)
            if took > 0:
                found[name] = round(found.get(name, 0.0) + took, 4)
        return found
