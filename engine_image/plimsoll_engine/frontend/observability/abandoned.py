"""Requests that the worker runs on for nobody.

Their client was answered or left, and their abort was never heard. A worker cannot tell them from
others; what they hold is lost until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

REPORTS = 10
"""An abort is read between two steps, and reports are half a second apart or a step where that is
longer: one that is under way is never so late, however long the steps."""


class AbandonedTracker:
    """Track one worker's abandoned requests; ``waited_for`` tells if a client still waits."""

    def __init__(self, waited_for: Callable[[str], bool]) -> None:
        self._waited_for = waited_for
        self._seen: dict[str, int] = {}
        self._told: list[str] = []

    def update(self, running: Iterable[str]) -> list[str] | None:
        """Take in the requests of one report; return those that are abandoned by now.

        None where they are the same as before.
        """
        self._seen = {
            name: self._seen.get(name, 0) + 1 for name in running if not self._waited_for(name)
        }
        found = sorted(name for name, reports in self._seen.items() if reports > REPORTS)
        if found == self._told:
            return None
        self._told = found
        return found
