"""What the kernel accounts for the engine's control group, as metrics. Unknown is absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_sidecar.signals.process.cgroup import CgroupMemory

PREFIX = "plimsoll_cgroup_memory"


class GroupMetrics(Collector):
    """``newest`` gives the reading of the newest sample."""

    def __init__(self, newest: Callable[[], CgroupMemory]) -> None:
        self._newest = newest

    def collect(self) -> Iterable[Metric]:
        group = self._newest()
        sizes = GaugeMetricFamily(
            f"{PREFIX}_bytes", "Memory of the engine's control group.", labels=("kind",)
        )
        for kind in ("current", "anon", "shmem", "file", "slab", "swap", "limit"):
            _add(sizes, kind, getattr(group, kind))
        yield sizes
        events = CounterMetricFamily(
            f"{PREFIX}_events",
            "Events of the group: held back above memory.high, out of memory, processes killed.",
            labels=("event",),
        )
        _add(events, "high", group.throttled)
        _add(events, "oom", group.ooms)
        _add(events, "oom_kill", group.oom_kills)
        yield events
        stalled = CounterMetricFamily(
            f"{PREFIX}_stalled_seconds",
            "Time that some or all tasks of the group waited for memory (PSI).",
            labels=("share",),
        )
        _add(stalled, "some", group.stalled_some_s)
        _add(stalled, "full", group.stalled_full_s)
        yield stalled


def _add(family: GaugeMetricFamily | CounterMetricFamily, label: str, value: float | None) -> None:
    if value is not None:
        family.add_metric((label,), value)
