"""Trace Python's allocations with tracemalloc, within limits of time, CPU time and memory."""

import threading
import time
import tracemalloc
from typing import Dict, List, Tuple

from plimsoll_probe.diagnostics import BATCH_PAUSE_S, MAX_TABLE_ROWS, MAX_TEXT_CHARS

MAX_TRACE_S = 60.0
MAX_CPU_S_PER_TRACE = 0.025
"""Maximum CPU time of the process during a trace, which limits the delay of requests: under
tracemalloc, code that only allocates runs six times slower (Python 3.11)."""
MAX_TRACE_BYTES = 512 << 10
"""Maximum size of tracemalloc's own tables; a snapshot of such tables takes two milliseconds."""
CHECK_INTERVAL_S = 0.005
TRACES_PER_BATCH = 500


class AllocationTracer:
    """Tracer that sums up allocations by source line; it stops at the first of its limits."""

    def __init__(self) -> None:
        self._is_owner = False
        self._deadline_s = 0.0
        self._start_s = self._cpu_deadline_s = 0.0
        self._sizes: Dict[Tuple[str, int], List[int]] = {}
        self._duration_s = 0.0
        self._snapshot_bytes = 0
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether a trace of this tracer is running; traces of other code do not count."""
        return self._is_owner and tracemalloc.is_tracing()

    def abandon_in_child(self) -> None:
        """End an inherited trace, because the thread that limits it runs in the parent alone."""
        self._lock = threading.Lock()
        if self.is_running:
            tracemalloc.stop()
        self._is_owner = False

    def get_trace_bytes(self) -> int:
        """Return the memory use of the trace itself."""
        tables = tracemalloc.get_tracemalloc_memory() if self.is_running else 0
        return tables + self._snapshot_bytes

    def run_step(self, step: str) -> str:
        """Start or end a trace, and return the result as text.

        ``step`` is ``start``, ``diff`` (end the trace and list the allocations by source line) or
        ``stop`` (discard the trace).
        """
        steps = {
            "start": self._start_trace,
            "diff": self._list_allocations,
            "stop": self._discard_trace,
        }
        return (
            steps[step]()
            if step in steps
            else f"unknown step {step[:40]!r}: use start, diff or stop"
        )

    def _start_trace(self) -> str:
        with self._lock:
            if tracemalloc.is_tracing():
                return (
                    "tracing was not started: this process already traces allocations with "
                    "tracemalloc"
                )
            tracemalloc.start()
            self._is_owner, self._sizes, self._duration_s = True, {}, 0.0
            self._start_s = time.monotonic()
            self._deadline_s = self._start_s + MAX_TRACE_S
            self._cpu_deadline_s = time.process_time() + MAX_CPU_S_PER_TRACE
        threading.Thread(target=self._stop_at_limit, name="plimsoll-trace", daemon=True).start()
        return "started"

    def _stop_at_limit(self) -> None:
        while self.is_running:
            full = (
                tracemalloc.get_tracemalloc_memory() > MAX_TRACE_BYTES
                or time.process_time() > self._cpu_deadline_s
            )
            if full or time.monotonic() > self._deadline_s:
                self._stop_tracing(keep_sums=full)
                return
            time.sleep(CHECK_INTERVAL_S)

    def _list_allocations(self) -> str:
        if self.is_running:
            self._stop_tracing(keep_sums=True)
        if not self._duration_s:
            return (
                "no trace is available: run the step start, and then the step diff within "
                f"{MAX_TRACE_S:.0f} s"
            )
        lines = [f"-- allocated within {self._duration_s:.1f} s"]
        most = sorted(self._sizes.items(), key=lambda one: one[1][0], reverse=True)
        for (name, line), (size, count) in most[:MAX_TABLE_ROWS]:
            lines.append(f"{name}:{line}: size=+{size} B, count=+{count}")
        return "\n".join(lines)[:MAX_TEXT_CHARS]

    def _stop_tracing(self, keep_sums: bool) -> None:
        with self._lock:
            if not self.is_running:
                return
            self._duration_s = time.monotonic() - self._start_s
            tables = tracemalloc.get_tracemalloc_memory()
            snapshot = tracemalloc.take_snapshot() if keep_sums else None
            tracemalloc.stop()
            self._is_owner = False
            if snapshot is not None:
                self._snapshot_bytes = 2 * tables  # a tuple of the snapshot is twice a table entry
                self._sum_by_line(snapshot)
                self._snapshot_bytes = 0

    def _sum_by_line(self, snapshot: tracemalloc.Snapshot) -> None:
        for number, trace in enumerate(snapshot.traces):
            if number % TRACES_PER_BATCH == TRACES_PER_BATCH - 1:
                time.sleep(BATCH_PAUSE_S)
            frame = trace.traceback[0]
            if frame.filename not in PROBE_TRACE_FILES:
                found = self._sizes.setdefault((frame.filename, frame.lineno), [0, 0])
                found[0] += trace.size
                found[1] += 1

    def _discard_trace(self) -> str:
        self._stop_tracing(keep_sums=False)
        with self._lock:
            self._sizes, self._duration_s = {}, 0.0
        return "stopped"


PROBE_TRACE_FILES = (tracemalloc.__file__, __file__)
ALLOCATION_TRACER = AllocationTracer()
