"""Report of Python allocations by source line, and of their growth."""

from __future__ import annotations

import tracemalloc

TOP = 40
"""Lines of a ranking."""
OFF = "tracing is off; start the engine with PYTHONTRACEMALLOC=1 to see allocations"


class Allocations:
    """Reporter of Python allocations. It keeps the previous snapshot for comparison.

    It never enables tracing, which slows the process down and has growing tables.
    """

    def __init__(self) -> None:
        self._last: tracemalloc.Snapshot | None = None

    def report(self) -> str:
        """Return current allocations by source line, and their growth since the previous call."""
        if not tracemalloc.is_tracing():
            return OFF
        now = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
        )
        last, self._last = self._last, now
        lines = ["-- held now", *map(str, now.statistics("lineno")[:TOP])]
        if last is None:
            lines.append("-- growth: request it again, this was the first snapshot")
        else:
            grown = [one for one in now.compare_to(last, "lineno") if one.size_diff > 0]
            lines += ["-- growth since the previous request", *map(str, grown[:TOP])]
        return "\n".join(lines)
