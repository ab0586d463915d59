"""Tracker of requests that the worker runs after their clients have gone.

A request is abandoned if its abort message was lost. Its memory in the worker counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

# Consecutive reports with a request that has no client. The worker reads aborts between two
# reports, so an abort that was not lost takes effect within fewer.
MAX_REPORTS_WITHOUT_CLIENT = 10


class AbandonedTracker:
    """Tracker of the abandoned requests of one worker."""

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
