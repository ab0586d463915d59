"""Where Python memory was allocated, and what grew since somebody last asked."""

from __future__ import annotations

import tracemalloc

TOP = 40
"""Lines of a ranking: enough to see a leak, few enough to read."""
OFF = "tracing is off; start the engine with PYTHONTRACEMALLOC=1 to see allocations"


class Allocations:
    """Keeps the snapshot of the last question to compare with.

    Tracing is never switched on by asking: it costs speed, and its own tables grow.
    """

    def __init__(self) -> None:
        self._last: tracemalloc.Snapshot | None = None

    def report(self) -> str:
        """Growth by source line since the last call, on top of it all that is held now."""
        if not tracemalloc.is_tracing():
            return OFF
        now = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
        )
        last, self._last = self._last, now
        lines = ["-- held now", *map(str, now.statistics("lineno")[:TOP])]
        if last is None:
            lines.append("-- growth: ask again, this was the first snapshot")
        else:
            grown = [one for one in now.compare_to(last, "lineno") if one.size_diff > 0]
            lines += ["-- grown since the last question", *map(str, grown[:TOP])]
        return "\n".join(lines)
