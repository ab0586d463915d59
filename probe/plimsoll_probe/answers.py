"""Answers each request; nothing is computed before a request arrives."""

import os
import time
from typing import Any, Callable, Dict, Optional

from plimsoll_probe import texts
from plimsoll_probe.engines import Engine
from plimsoll_probe.memory import Allocators, collections, devices, host_pinned
from plimsoll_probe.trim import trim

VERSION = 1
"""Version of the report format."""
MAX_CPU_SHARE = 0.002
"""Maximum share of one CPU for reports: an expensive report is reused for longer. The cheaper of
the last two counts, because the first one searches for the engine's objects and takes many times as
long."""


class Reports:
    """Creator of reports that reuses each one until its cost is within :data:`MAX_CPU_SHARE`.

    In a report, ``cost_s`` is its CPU time and ``age_s`` its age.
    """

    def __init__(self) -> None:
        self._allocators: Optional[Allocators] = None
        self._engine = Engine()
        self._newest: Dict[str, Any] = {}
        self._made = 0.0
        self._pause_s = 0.0

    def report(self) -> Dict[str, Any]:
        """Return a report, which is at most one pause old."""
        now = time.monotonic()
        # After a fork, this is still the report of the parent.
        forked = self._newest.get("pid") != os.getpid()
        if forked or now - self._made > self._pause_s:
            before_s = 0.0 if forked else self._newest["cost_s"]
            self._newest, self._made = self._make(), now
            self._pause_s = min(before_s, self._newest["cost_s"]) / MAX_CPU_SHARE
        return {**self._newest, "age_s": now - self._made}

    def _make(self) -> Dict[str, Any]:
        if self._allocators is None:
            self._allocators = Allocators()
        begin = time.thread_time()
        made: Dict[str, Any] = {"version": VERSION, "pid": os.getpid()}
        made.update(self._allocators.read())
        made["gc"] = collections()
        parts: Dict[str, Callable[[], Any]] = {
            "devices": devices,
            "host_pinned": host_pinned,
            "engine": self._engine.read,
            "diagnostics": lambda: {"bytes": texts.held_bytes(), "bound": texts.MAX_HELD_BYTES},
        }
        for name, part in parts.items():
            try:
                found = part()
            except Exception:  # noqa: BLE001 - the value is unknown
                found = None
            if found is not None:
                made[name] = found
        made["cost_s"] = time.thread_time() - begin
        return made


REPORTS = Reports()
ANSWERS: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "report": lambda request: REPORTS.report(),
    "stacks": lambda request: {"text": texts.stacks()},
    "gc": lambda request: {"text": texts.gc_objects()},
    "torch": lambda request: {"text": texts.torch_memory()},
    "tracemalloc": lambda request: {
        "text": texts.ALLOCATIONS.run_step(str(request.get("step", "")))
    },
    "trim": lambda request: trim(idle=request.get("idle") is True),
}
"""The function for each request."""


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the answer to ``request``; ``{"error": …}`` if it is unknown."""
    made = ANSWERS.get(str(request.get("do", "")))
    if made is None:
        return {"error": f"unknown request; known are {', '.join(ANSWERS)}"}
    return made(request)
