"""Time that the event loop was blocked: no stream and no probe moves meanwhile.

A beat is due every :data:`BEAT_S`; its delay is the time that something blocked the loop. Delay is
wall-clock time, which on a busy node includes the CPU time of other processes. The CPU time of this
process in the same interval bounds its own share.
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
"""Interval of beats, and maximum error of a measured block.

50 beats a second cost about a thousandth of a core.
"""
WINDOW_S = 60.0
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopBlocks(Collector):
    """Collector of event loop blocks between :meth:`start` and :meth:`stop`.

    It exports a histogram, and the longest block of the last one to two minutes.
    """

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        self._histogram = Histogram(
            PREFIX + "event_loop_block_seconds",
            "Delay of the event loop's beats, which are due every 20 ms.",
            ["model_name"],
            registry=registry,
            buckets=BUCKETS_S,
        ).labels(model)
        registry.register(self)
        self._timer: asyncio.TimerHandle | None = None
        self._windows = [(0.0, 0.0), (0.0, 0.0)]
        self._window_ends = 0.0

    def start(self) -> None:
        """Start measuring the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._window_ends = time.monotonic() + WINDOW_S
        self._schedule()

    def stop(self) -> None:
        """Stop measuring. Collected values stay."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def longest_s(self) -> tuple[float, float]:
        """Return the longest block in wall-clock seconds and in CPU seconds."""
        wall, cpu = zip(*self._windows, strict=True)
        return max(wall), max(cpu)

    def collect(self) -> Iterable[Metric]:
        """Yield the longest recent block, in seconds of wall-clock and of CPU time."""
        longest = GaugeMetricFamily(
            PREFIX + "event_loop_block_max_seconds",
            "Longest block of the event loop in the last one to two minutes; clock=cpu is the CPU"
            " time of this process in it.",
            labels=["model_name", "clock"],
        )
        for clock, value in zip(("wall", "cpu"), self.longest_s(), strict=True):
            longest.add_metric([self._model, clock], value)
        yield longest

    def _schedule(self) -> None:
        # loop.time() can be stale: some loops cache it while a callback runs.
        self._due = time.monotonic() + BEAT_S
        self._cpu = time.process_time()
        self._timer = self._loop.call_later(BEAT_S, self._on_beat)

    def _on_beat(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        self._histogram.observe(late)
        if now >= self._window_ends:
            self._windows = [(0.0, 0.0), self._windows[0]]
            self._window_ends = now + WINDOW_S
        wall, cpu = self._windows[0]
        used = min(late, time.process_time() - self._cpu)
        self._windows[0] = max(wall, late), max(cpu, used)
        self._schedule()
