"""Tracker of abandoned requests: the worker runs them, but no client waits for them.

A request is abandoned if its abort message was lost. While the worker runs the request, its memory
counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MAX_REPORTS_WITHOUT_CLIENT = 10
"""Number of consecutive reports that may list a request without a client before it is abandoned.

The worker reports every 0.5 s, or after each longer step, and reads aborts between steps. An abort
that was not lost therefore takes effect within fewer reports.
"""


class AbandonedTracker:
    """Tracker of the abandoned requests of one worker.

    ``has_client(request_id)`` returns True if a client still waits for the request.
    """

    def __init__(self, has_client: Callable[[str], bool]) -> None:
        self._has_client = has_client
        self._seen: dict[str, int] = {}
        self._last: list[str] = []

    def update(self, running_ids: Iterable[str]) -> list[str] | None:
        """Record the IDs of the running requests from a report of the worker.

        Return the sorted IDs of all abandoned requests; None if they have not changed.
        """
        self._seen = {
            name: self._seen.get(name, 0) + 1 for name in running_ids if not self._has_client(name)
        }
        abandoned = sorted(
            name for name, reports in self._seen.items() if reports > MAX_REPORTS_WITHOUT_CLIENT
        )
        if abandoned == self._last:
            return None
        self._last = abandoned
        return abandoned
