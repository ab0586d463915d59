"""Diagnostics as text of limited size."""

import collections
import gc
import sys
import threading
import time
import tracemalloc
from typing import Dict, List, Optional

from plimsoll_probe.memory import cuda

MAX_THREADS = 256
MAX_FRAMES = 64
MAX_TEXT_CHARS = 1 << 20
MAX_ROWS = 40
"""Number of types or source lines that are listed."""
MAX_OBJECTS = 2_000_000
MAX_TRACE_S = 60.0
"""Seconds after which a trace stops itself."""
MAX_TRACE_BYTES = 128 << 20
"""Size of tracemalloc's own tables at which a trace stops itself."""


def stacks() -> str:
    """Return the stacks of all threads, innermost call first, in the format of ``faulthandler``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: List[str] = []
    for ident, top in list(sys._current_frames().items())[:MAX_THREADS]:
        lines.append(f"Thread {ident} [{names.get(ident, '?')}] (most recent call first):")
        frame, depth = top, 0
        while frame is not None and depth < MAX_FRAMES:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
        if frame is not None:
            lines.append("  ...")
        lines.append("")
    return "\n".join(lines)[:MAX_TEXT_CHARS]


def gc_objects() -> str:
    """Return the counts of the collector, and the most frequent types that it tracks."""
    lines = [f"-- collections {gc.get_stats()}", f"-- frozen {gc.get_freeze_count()}"]
    objects = gc.get_objects()
    lines.append(f"-- {len(objects)} tracked objects")
    counted = collections.Counter(type(one) for one in objects[:MAX_OBJECTS])
    del objects
    for kind, count in counted.most_common(MAX_ROWS):
        lines.append(f"{count:>10} {kind.__module__}.{kind.__qualname__}")
    return "\n".join(lines)[:MAX_TEXT_CHARS]


def torch_memory() -> str:
    """Return PyTorch's summary of each device, or that CUDA is not in use."""
    module = cuda()
    if module is None:
        return "CUDA is not initialized in this process"
    return "\n".join(module.memory_summary(i) for i in range(module.device_count()))[
        :MAX_TEXT_CHARS
    ]


class Allocations:
    """Traces allocations with tracemalloc from ``start`` to ``stop``.

    Tracing slows Python down. So it stops itself after :data:`MAX_TRACE_S`, or when its tables
    reach :data:`MAX_TRACE_BYTES`.
    """

    def __init__(self) -> None:
        self._first: Optional[tracemalloc.Snapshot] = None
        self._is_ours = False
        self._until = 0.0

    def run_step(self, step: str) -> str:
        """Execute a step: ``start``, ``diff`` (the growth since the start) or ``stop``."""
        steps: Dict[str, str] = {}
        if step == "start":
            steps["start"] = self._start()
        elif step == "diff":
            steps["diff"] = self._diff()
        elif step == "stop":
            steps["stop"] = self._stop()
        return steps.get(step, "step: expected start, diff or stop")

    def _start(self) -> str:
        if not tracemalloc.is_tracing():
            tracemalloc.start()
            self._is_ours = True
            self._until = time.monotonic() + MAX_TRACE_S
            threading.Thread(target=self._stop_at_limit, name="plimsoll-trace", daemon=True).start()
        self._first = _snapshot()
        return "started"

    def _stop_at_limit(self) -> None:
        while self._is_ours and tracemalloc.is_tracing():
            if (
                time.monotonic() > self._until
                or tracemalloc.get_tracemalloc_memory() > MAX_TRACE_BYTES
            ):
                self._stop()
                return
            time.sleep(0.5)

    def _diff(self) -> str:
        first = self._first
        if first is None or not tracemalloc.is_tracing():
            return "not tracing: it was not started, or it stopped at its limit"
        grown = [one for one in _snapshot().compare_to(first, "lineno") if one.size_diff > 0]
        return "\n".join(["-- grown since tracing began", *map(str, grown[:MAX_ROWS])])[
            :MAX_TEXT_CHARS
        ]

    def _stop(self) -> str:
        """Stop tracing, unless other code started it."""
        self._first = None
        if self._is_ours:
            self._is_ours = False
            tracemalloc.stop()
        return "stopped"


def _snapshot() -> tracemalloc.Snapshot:
    ours = [tracemalloc.Filter(False, name) for name in (tracemalloc.__file__, __file__)]
    return tracemalloc.take_snapshot().filter_traces(ours)


ALLOCATIONS = Allocations()
