"""Measure how long the event loop is blocked.

The delay of a timer is the duration of a block. Wall-clock time includes the time of other
processes, so the CPU time of this process is measured as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_engine.frontend.observability.ledger_metrics import METRIC_PREFIX

# Maximum error of a measured block. 50 calls per second use about a thousandth of a core.
TIMER_INTERVAL_S = 0.02
# The longest block is that of the current and the previous window.
LONGEST_BLOCK_WINDOW_S = 60.0
BLOCK_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopBlocks(Collector):
    """Collector of the blocks of the event loop between :meth:`start` and :meth:`stop`."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        self._histogram = Histogram(
            METRIC_PREFIX + "event_loop_block_seconds",
            "Delay of a timer in the event loop that fires every 20 ms.",
            ["model_name"],
            registry=registry,
            buckets=BLOCK_BUCKETS_S,
        ).labels(model)
        registry.register(self)
        self._timer: asyncio.TimerHandle | None = None
        self._windows = [(0.0, 0.0), (0.0, 0.0)]
        self._window_ends = 0.0

    def start(self) -> None:
        """Start measuring the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._window_ends = time.monotonic() + LONGEST_BLOCK_WINDOW_S
        self._schedule_timer()

    def stop(self) -> None:
        """Stop measuring. The measured values stay available."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def get_longest_block_s(self) -> tuple[float, float]:
        """Return the longest recent block in wall-clock seconds, and the longest in CPU seconds."""
        wall, cpu = zip(*self._windows, strict=True)
        return max(wall), max(cpu)

    def collect(self) -> Iterable[Metric]:
        """Yield the metric of the longest recent block, in wall-clock and CPU seconds."""
        longest = GaugeMetricFamily(
            METRIC_PREFIX + "event_loop_block_max_seconds",
            "Longest time that the event loop was blocked in the last one to two minutes. clock=cpu"
            " is the CPU time of this process meanwhile.",
            labels=["model_name", "clock"],
        )
        for clock, value in zip(("wall", "cpu"), self.get_longest_block_s(), strict=True):
            longest.add_metric([self._model, clock], value)
        yield longest

    def _schedule_timer(self) -> None:
        # loop.time() can be stale: some loops cache it while a callback runs.
        self._due = time.monotonic() + TIMER_INTERVAL_S
        self._cpu = time.process_time()
        self._timer = self._loop.call_later(TIMER_INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        self._histogram.observe(late)
        if now >= self._window_ends:
            self._windows = [(0.0, 0.0), self._windows[0]]
            self._window_ends = now + LONGEST_BLOCK_WINDOW_S
        wall, cpu = self._windows[0]
        used = min(late, time.process_time() - self._cpu)
        self._windows[0] = max(wall, late), max(cpu, used)
        self._schedule_timer()
