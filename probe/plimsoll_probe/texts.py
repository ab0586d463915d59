"""Diagnostics as text of limited size."""

import collections
import gc
import sys
import threading
import time
import tracemalloc
from typing import Any, Dict, List, Tuple

from plimsoll_probe.memory import cuda, has_few_objects, young_objects

MAX_THREADS = 256
MAX_FRAMES = 64
MAX_TEXT_CHARS = 1 << 20
MAX_ROWS = 40
"""Number of types or source lines that are listed."""
OBJECTS_AT_ONCE, TRACES_AT_ONCE = 10_000, 500
REST_S = 0.05
"""Seconds for which the engine's threads have the interpreter to themselves, after each part of a
millisecond or less."""
MAX_TRACE_S = 60.0
"""Seconds after which a trace stops itself."""
MAX_TRACE_CPU_S = 0.025
"""CPU seconds of the process after which a trace stops itself. Python that only allocates is six
times slower while it is traced (3.11), so that a request loses less than this."""
MAX_TRACE_BYTES = 512 << 10
"""Size of tracemalloc's own tables at which a trace stops itself. They have 8,192 entries then,
which Python copies in one call, in two milliseconds."""
TRACE_CHECK_S = 0.005
MAX_HELD_BYTES = 8 << 20
"""More than diagnostics ever hold at a time."""
HELD: Dict[str, int] = {"objects": 0, "traces": 0}
"""Bytes of lists that diagnostics hold now."""


def held_bytes() -> int:
    """Return what diagnostics hold now, in bytes."""
    return sum(HELD.values()) + (tracemalloc.get_tracemalloc_memory() if ALLOCATIONS.traces else 0)


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
    """Return the counts of the collector, and the most frequent types that it tracks.

    Its list of all objects is made in one call, during which no other thread runs. In a process
    that has too many objects for that, only those count that were made recently.
    """
    lines = [f"-- collections {gc.get_stats()}"]
    counted: "collections.Counter[type]" = collections.Counter()
    if has_few_objects():
        lines.append(f"-- {_count_types(gc.get_objects(), counted)} tracked objects")
    elif (found := young_objects()) is None:
        lines.append("-- too many objects to list: the collector is disabled, or runs seldom")
    else:
        recent, blocks = _count_types(found, counted), sys.getallocatedblocks()
        lines.append(f"-- {recent} tracked objects made recently, of some {blocks} objects in all")
    for kind, count in counted.most_common(MAX_ROWS):
        lines.append(f"{count:>10} {kind.__module__}.{kind.__qualname__}")
    return "\n".join(lines)[:MAX_TEXT_CHARS]


def _count_types(objects: List[Any], counted: "collections.Counter[type]") -> int:
    """Add the types of ``objects``, which ends empty; return how many there were."""
    size = len(objects)
    while objects:
        HELD["objects"] = sys.getsizeof(objects)
        counted.update(map(type, objects[-OBJECTS_AT_ONCE:]))
        del objects[-OBJECTS_AT_ONCE:]
        time.sleep(REST_S)
    HELD["objects"] = 0
    return size


def torch_memory() -> str:
    """Return PyTorch's summary of each device, or that CUDA is not in use."""
    module = cuda()
    if module is None:
        return "CUDA is not initialized in this process"
    return "\n".join(module.memory_summary(i) for i in range(module.device_count()))[
        :MAX_TEXT_CHARS
    ]


class Allocations:
    """Trace of allocations with tracemalloc, from ``start`` to ``stop``.

    Tracing slows Python down. So it ends after :data:`MAX_TRACE_CPU_S` of the process, or when its
    tables reach :data:`MAX_TRACE_BYTES`; what it has seen until then is kept for ``diff``.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._until = 0.0
        self._begun = self._cpu_until = 0.0
        self._sizes: Dict[Tuple[str, int], List[int]] = {}
        self._lasted = 0.0
        self._lock = threading.Lock()

    @property
    def traces(self) -> bool:
        """Whether a trace that was started here is in progress."""
        return self._is_ours and tracemalloc.is_tracing()

    def run_step(self, step: str) -> str:
        """Execute a step: ``start``, ``diff`` (the growth since the start) or ``stop``."""
        steps = {"start": self._start, "diff": self._diff, "stop": self._stop}
        return steps[step]() if step in steps else "step: expected start, diff or stop"

    def _start(self) -> str:
        with self._lock:
            if tracemalloc.is_tracing():
                return "not started: allocations are traced already"
            tracemalloc.start()
            self._is_ours, self._sizes, self._lasted = True, {}, 0.0
            self._begun = time.monotonic()
            self._until = self._begun + MAX_TRACE_S
            self._cpu_until = time.process_time() + MAX_TRACE_CPU_S
        threading.Thread(target=self._end_at_limit, name="plimsoll-trace", daemon=True).start()
        return "started"

    def _end_at_limit(self) -> None:
        while self.traces:
            full = (
                tracemalloc.get_tracemalloc_memory() > MAX_TRACE_BYTES
                or time.process_time() > self._cpu_until
            )
            if full or time.monotonic() > self._until:
                self._end(keep=full)
                return
            time.sleep(TRACE_CHECK_S)

    def _diff(self) -> str:
        if self.traces:
            self._end(keep=True)
        if not self._lasted:
            return "not tracing: it was not started, or it stopped at its limit"
        lines = [f"-- grown in {self._lasted:.1f} s"]
        most = sorted(self._sizes.items(), key=lambda one: one[1][0], reverse=True)
        for (name, line), (size, count) in most[:MAX_ROWS]:
            lines.append(f"{name}:{line}: size=+{size} B, count=+{count}")
        return "\n".join(lines)[:MAX_TEXT_CHARS]

    def _end(self, keep: bool) -> None:
        """End the trace; with ``keep``, add up by source line what it has seen."""
        with self._lock:
            if not self.traces:
                return
            self._lasted = time.monotonic() - self._begun
            tables = tracemalloc.get_tracemalloc_memory()
            snapshot = tracemalloc.take_snapshot() if keep else None
            tracemalloc.stop()
            self._is_ours = False
            if snapshot is not None:
                HELD["traces"] = 2 * tables  # a table entry takes half of what its tuple does
                self._add_up(snapshot)
                HELD["traces"] = 0

    def _add_up(self, snapshot: tracemalloc.Snapshot) -> None:
        for number, trace in enumerate(snapshot.traces):
            if number % TRACES_AT_ONCE == TRACES_AT_ONCE - 1:
                time.sleep(REST_S)
            frame = trace.traceback[0]
            if frame.filename not in OWN_FILES:
                found = self._sizes.setdefault((frame.filename, frame.lineno), [0, 0])
                found[0] += trace.size
                found[1] += 1

    def _stop(self) -> str:
        """Stop tracing, unless other code started it."""
        self._end(keep=False)
        with self._lock:
            self._sizes, self._lasted = {}, 0.0
        return "stopped"


OWN_FILES = (tracemalloc.__file__, __file__)
ALLOCATIONS = Allocations()
