"""Record what the worker loop did recently, to explain a delayed Stop message."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_RECORDED_SPANS = 32


class ActivityRecorder:
    """Recorder of consecutive spans of one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=MAX_RECORDED_SPANS)
        self._since = clock()

    def begin(self) -> None:
        """Begin the next span now instead of at the end of the previous one."""
        self._since = self._clock()

    def record(self, name: str) -> None:
        """End the current span, and record it under ``name``."""
        now = self._clock()
        self._spans.append((name, self._since, now))
        self._since = now

    def get_durations_since(self, start: float) -> dict[str, float]:
        """Return the seconds of each activity since ``start``, by name."""
        durations: dict[str, float] = {}
        for name, begin, end in self._spans:
            seconds = end - max(begin, start)
            if seconds > 0:
                durations[name] = round(durations.get(name, 0.0) + seconds, 4)
        return durations
