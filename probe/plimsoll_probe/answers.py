"""Answer requests for reports, diagnostics and trims."""

import os
import time
from typing import Any, Callable, Dict, Optional

from plimsoll_probe import diagnostics
from plimsoll_probe.allocation_tracing import ALLOCATION_TRACER
from plimsoll_probe.engines import EngineReader
from plimsoll_probe.memory import (
    AllocatorReader,
    read_devices,
    read_gc_statistics,
    read_pinned_bytes,
)
from plimsoll_probe.trim import trim_memory

REPORT_VERSION = 1
MAX_CPU_SHARE = 0.002
"""Maximum share of one CPU that reports may take; expensive reports are cached longer."""


class ReportCache:
    """Cache that limits the CPU use of reports to :data:`MAX_CPU_SHARE`.

    A report contains ``cost_s``, the CPU seconds for creating the report, and ``age_s``, its age.
    """

    def __init__(self) -> None:
        self._allocators: Optional[AllocatorReader] = None
        self._engine = EngineReader()
        self._newest: Dict[str, Any] = {}
        self._report_time_s = 0.0
        self._max_age_s = 0.0

    def get_report(self) -> Dict[str, Any]:
        """Return the cached report, or a new one if it is too old."""
        now = time.monotonic()
        # A forked child inherits the parent's report.
        forked = self._newest.get("pid") != os.getpid()
        if forked or now - self._report_time_s > self._max_age_s:
            cost_before_s = 0.0 if forked else self._newest["cost_s"]
            self._newest, self._report_time_s = self._create_report(), now
            # The first report costs more than later ones: it also searches for the engine's
            # objects.
            self._max_age_s = min(cost_before_s, self._newest["cost_s"]) / MAX_CPU_SHARE
        return {**self._newest, "age_s": now - self._report_time_s}

    def _create_report(self) -> Dict[str, Any]:
        if self._allocators is None:
            self._allocators = AllocatorReader()
        start_s = time.thread_time()
        report: Dict[str, Any] = {"version": REPORT_VERSION, "pid": os.getpid()}
        report.update(self._allocators.read())
        report["gc"] = read_gc_statistics()
        readers: Dict[str, Callable[[], Any]] = {
            "devices": read_devices,
            "host_pinned": read_pinned_bytes,
            "engine": self._engine.read,
            "diagnostics": lambda: {
                "bytes": diagnostics.get_object_list_bytes() + ALLOCATION_TRACER.get_trace_bytes(),
                "bound": diagnostics.MAX_DIAGNOSTICS_BYTES,
            },
        }
        for name, read in readers.items():
            try:
                value = read()
            except Exception:  # noqa: BLE001 - the value is unknown
                value = None
            if value is not None:
                report[name] = value
        report["cost_s"] = time.thread_time() - start_s
        return report


REPORT_CACHE = ReportCache()
ANSWER_BY_REQUEST_NAME: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "report": lambda request: REPORT_CACHE.get_report(),
    "stacks": lambda request: {"text": diagnostics.format_stacks()},
    "gc": lambda request: {"text": diagnostics.format_gc_objects()},
    "torch": lambda request: {"text": diagnostics.format_torch_memory()},
    "tracemalloc": lambda request: {
        "text": ALLOCATION_TRACER.run_step(str(request.get("step", "")))
    },
    "trim": lambda request: trim_memory(idle=request.get("idle") is True),
}
"""Functions that answer requests, by the value of the request's key ``do``."""


def answer_request(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the answer to ``request``; it has the key ``error`` if the request is unknown."""
    function = ANSWER_BY_REQUEST_NAME.get(str(request.get("do", "")))
    if function is None:
        return {"error": f'unknown request: set "do" to one of {", ".join(ANSWER_BY_REQUEST_NAME)}'}
    return function(request)
