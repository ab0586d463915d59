"""Metrics of the newest sample: the control group's memory, and open files. Unknown is absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.trace import OpenFiles
from plimsoll_sidecar.background import parts_ok
from plimsoll_sidecar.signals.cgroup import CgroupMemory

PREFIX = "plimsoll_cgroup_memory"


class GroupMetrics(Collector):
    """What the kernel accounts for the engine's group; ``newest`` gives its newest reading."""

    def __init__(self, newest: Callable[[], CgroupMemory]) -> None:
        self._newest = newest

    def collect(self) -> Iterable[Metric]:
        """Yield sizes in bytes, counts of events, and seconds of waiting.

        The kernel had them at the newest sample.
        """
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


class PartsMetrics(Collector):
    """Whether the supervisor's threads succeed in their work."""

    def collect(self) -> Iterable[Metric]:
        """Yield one sample for each part that runs."""
        family = GaugeMetricFamily(
            "plimsoll_supervisor_part_ok",
            "1 where the newest turn of this part of the supervisor succeeded, 0 where it failed.",
            labels=("part",),
        )
        for part, ok in sorted(parts_ok().items()):
            family.add_metric((part,), int(ok))
        yield family


class OpenFilesMetrics(Collector):
    """Open file descriptors of the engine; ``newest`` is their newest reading."""

    def __init__(self) -> None:
        self.newest: OpenFiles | None = None

    def collect(self) -> Iterable[Metric]:
        """Return the count and the limit; two families without a sample where they are unknown."""
        count = GaugeMetricFamily(
            "plimsoll_engine_open_fds",
            "Open file descriptors of the engine's process that is nearest to its limit.",
        )
        limit = GaugeMetricFamily(
            "plimsoll_engine_max_fds", "Limit of open file descriptors of that process."
        )
        if self.newest is not None:
            count.add_metric([], self.newest.open)
            limit.add_metric([], self.newest.limit)
        return count, limit


def _add(family: GaugeMetricFamily | CounterMetricFamily, label: str, value: float | None) -> None:
    if value is not None:
        family.add_metric((label,), value)
