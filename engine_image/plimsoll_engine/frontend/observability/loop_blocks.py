"""How long the event loop was blocked: while it is, no stream moves and no probe is answered.

A beat is due every :data:`BEAT_S`; how much later it comes is how long something kept the loop.
Lateness is counted in wall-clock time, which on a busy node includes time that other processes had
the processor. The CPU time that this process used meanwhile bounds what of it was its own doing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_engine.frontend.observability.ledger_metrics import PREFIX

BEAT_S = 0.02
"""A block can look shorter by as much. 50 beats a second cost about a thousandth of a core."""
WINDOW_S = 60.0
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopBlocks(Collector):
    """How long the event loop was blocked, between :meth:`start` and :meth:`stop`.

    The longest block of the present and the last minute is told besides the histogram.
    """

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        self._histogram = Histogram(
            PREFIX + "event_loop_block_seconds",
            "How late the event loop came to a beat that is due every 20 ms.",
            ["model_name"],
            registry=registry,
            buckets=BUCKETS_S,
        ).labels(model)
        registry.register(self)
        self._timer: asyncio.TimerHandle | None = None
        self._windows = [(0.0, 0.0), (0.0, 0.0)]
        self._window_ends = 0.0

    def start(self) -> None:
        """Begin to measure the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._window_ends = time.monotonic() + WINDOW_S
        self._next()

    def stop(self) -> None:
        """Measure no more; what was found stays."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def longest_s(self) -> tuple[float, float]:
        """Wall-clock and CPU seconds."""
        wall, cpu = zip(*self._windows, strict=True)
        return max(wall), max(cpu)

    def collect(self) -> Iterable[Metric]:
        """Yield the longest block of the last windows, in seconds of wall clock and of CPU time."""
        longest = GaugeMetricFamily(
            PREFIX + "event_loop_block_max_seconds",
            "The longest block of the event loop in the last one to two minutes; clock=cpu: what of"
            " it this process was computing.",
            labels=["model_name", "clock"],
        )
        for clock, value in zip(("wall", "cpu"), self.longest_s(), strict=True):
            longest.add_metric([self._model, clock], value)
        yield longest

    def _next(self) -> None:
        # The loop's own time stands still while a callback runs.
        self._due = time.monotonic() + BEAT_S
        self._cpu = time.process_time()
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        self._histogram.observe(late)
        if now >= self._window_ends:
            self._windows = [(0.0, 0.0), self._windows[0]]
            self._window_ends = now + WINDOW_S
        wall, cpu = self._windows[0]
        used = min(late, time.process_time() - self._cpu)
        self._windows[0] = max(wall, late), max(cpu, used)
        self._next()
