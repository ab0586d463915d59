"""The least growth within a window of time that slides."""

from __future__ import annotations

from collections import deque

WINDOW_SLOTS = 48


class SlidingLeast:
    """The least growth within a sliding window, in slots of a forty-eighth of it.

    Each slot keeps its mean: the least of many single readings would be noise. The slot that is
    still open does not count, else growth would be measured against itself.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._slot_s = window_s / WINDOW_SLOTS
        self._slots: deque[tuple[float, float, int]] = deque(maxlen=WINDOW_SLOTS + 2)

    def begin(self, t: float) -> None:
        """The baseline is the first slot: no growth yet."""
        self._slots.append((t - self._slot_s, 0.0, 1))

    def add(self, t: float, growth: int) -> None:
        since, mean, count = self._slots[-1]
        if t >= since + self._slot_s:
            self._slots.append((t, float(growth), 1))
        else:
            self._slots[-1] = (since, mean + (growth - mean) / (count + 1), count + 1)
        while len(self._slots) > 2 and self._slots[0][0] < t - self._window_s - self._slot_s:
            self._slots.popleft()

    def least(self) -> int:
        """The smallest mean of the closed slots."""
        means = [mean for _, mean, _ in self._slots]
        return int(min(means[:-1] or means))
