"""Abandoned requests: the worker still runs them, but no client waits for them.

The client was answered or disconnected, and the abort was lost. A worker cannot tell such requests
from others; their memory is lost until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

REPORTS = 10
"""Reports until a request without a client counts as abandoned.

The worker reads aborts between two steps, and reports every 0.5 s or after a longer step. An abort
that was not lost therefore takes fewer reports, however long the steps are.
"""


class AbandonedTracker:
    """Tracker of one worker's abandoned requests.

    ``has_client`` reports whether a client still waits for a request ID.
    """

    def __init__(self, has_client: Callable[[str], bool]) -> None:
        self._has_client = has_client
        self._seen: dict[str, int] = {}
        self._last: list[str] = []

    def update(self, running: Iterable[str]) -> list[str] | None:
        """Record the running requests of one report.

        Return the sorted IDs of all abandoned requests.

        None if they are the same as before.
        """
        self._seen = {
            name: self._seen.get(name, 0) + 1 for name in running if not self._has_client(name)
        }
        found = sorted(name for name, reports in self._seen.items() if reports > REPORTS)
        if found == self._last:
            return None
        self._last = found
        return found
