"""Report Python allocations by source line, and their growth."""

from __future__ import annotations

import tracemalloc

MAX_RANKED_LINES = 40
TRACING_OFF_MESSAGE = (
    "tracemalloc is off: start the engine with PYTHONTRACEMALLOC=1 to list allocations"
)


class AllocationReporter:
    """Reporter of Python allocations by source line. It never starts tracemalloc."""

    def __init__(self) -> None:
        self._last: tracemalloc.Snapshot | None = None

    def report(self) -> str:
        """Return the allocations by source line, and their growth since the last report."""
        if not tracemalloc.is_tracing():
            return TRACING_OFF_MESSAGE
        now = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
        )
        last, self._last = self._last, now
        lines = ["-- allocated now", *map(str, now.statistics("lineno")[:MAX_RANKED_LINES])]
        if last is None:
            lines.append("-- growth: unknown in the first report; request another one to see it")
        else:
            grown = [one for one in now.compare_to(last, "lineno") if one.size_diff > 0]
            lines += ["-- growth since the previous request", *map(str, grown[:MAX_RANKED_LINES])]
        return "\n".join(lines)
