"""Find abandoned requests: the worker runs them, but no client waits for them.

This happens if the client was answered or disconnected, and the abort message was lost. The worker
cannot recognise such requests, and their memory is lost until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

REPORTS = 10
"""Number of consecutive reports without a client after which a request counts as abandoned.

The worker reports every 0.5 s, or after each longer step, and reads aborts between steps. An abort
that was not lost therefore takes effect within fewer reports.
"""


class AbandonedTracker:
    """Tracker of the abandoned requests of one worker.

    ``has_client`` reports whether a client still waits for a request ID.
    """

    def __init__(self, has_client: Callable[[str], bool]) -> None:
        self._has_client = has_client
        self._seen: dict[str, int] = {}
        self._last: list[str] = []

    def update(self, running: Iterable[str]) -> list[str] | None:
        """Record the running requests of one report.

        Return the sorted IDs of all abandoned requests, or None if they have not changed.
        """
        self._seen = {
            name: self._seen.get(name, 0) + 1 for name in running if not self._has_client(name)
        }
        found = sorted(name for name, reports in self._seen.items() if reports > REPORTS)
        if found == self._last:
            return None
        self._last = found
        return found
