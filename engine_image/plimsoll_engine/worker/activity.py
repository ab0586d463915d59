"""Recent activity of the worker's loop, which shows what a Stop message had to wait for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_RECORDED_SPANS = 32
"""Number of recorded spans. They cover several iterations of the loop."""


class Activity:
    """Recorder of the consecutive spans of one thread. Each span ends where the next one begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=MAX_RECORDED_SPANS)
        self._since = clock()

    def begin(self) -> None:
        """Begin the next span now, so that earlier waiting is not counted."""
        self._since = self._clock()

    def record(self, name: str) -> None:
        """End the current span and record it under ``name``."""
        now = self._clock()
        self._spans.append((name, self._since, now))
        self._since = now

    def get_durations_since(self, moment: float) -> dict[str, float]:
        """Return the seconds of each activity since ``moment``, oldest first."""
        found: dict[str, float] = {}
        for name, begun, ended in self._spans:
            took = ended - max(begun, moment)
            if took > 0:
                found[name] = round(found.get(name, 0.0) + took, 4)
        return found
