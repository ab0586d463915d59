"""Collect metrics at each scrape, and count memory growth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.trace import OpenFiles
from plimsoll_sidecar.background import SamplingWatchdog, read_thread_status
from plimsoll_sidecar.signals.cgroup import CgroupMemory
from plimsoll_sidecar.signals.resident_memory import read_resident_memory

CGROUP_PREFIX = "plimsoll_cgroup_memory"
# Fields of CgroupMemory, and the values of the label kind.
EXPORTED_CGROUP_FIELDS = (
    "current", "anon", "shmem", "file", "slab", "kernel", "sock", "other", "reclaimable", "swap",
    "limit",
)  # fmt: skip


class CgroupCollector(Collector):
    """Collects the memory of the engine's cgroup at each scrape."""

    def __init__(self, get_newest: Callable[[], CgroupMemory]) -> None:
        self._get_newest = get_newest

    def collect(self) -> Iterable[Metric]:
        """Yield the sizes, event counts and stall times of the newest reading."""
        group = self._get_newest()
        sizes = GaugeMetricFamily(
            f"{CGROUP_PREFIX}_bytes", "Memory of the engine's cgroup by kind.", labels=("kind",)
        )
        for kind in EXPORTED_CGROUP_FIELDS:
            _add_if_known(sizes, kind, getattr(group, kind))
        yield sizes
        share = GaugeMetricFamily(
            f"{CGROUP_PREFIX}_limit_ratio",
            "Share of the cgroup's memory limit that is in use and not reclaimable.",
        )
        if group.limit_ratio is not None:
            share.add_metric([], group.limit_ratio)
        yield share
        events = CounterMetricFamily(
            f"{CGROUP_PREFIX}_events",
            "Events of the cgroup by kind: throttled above memory.high, out of memory, or "
            "process killed.",
            labels=("event",),
        )
        _add_if_known(events, "high", group.throttled)
        _add_if_known(events, "oom", group.ooms)
        _add_if_known(events, "oom_kill", group.oom_kills)
        yield events
        stalled = CounterMetricFamily(
            f"{CGROUP_PREFIX}_stalled_seconds",
            "Time for which some or all tasks of the cgroup waited for memory (PSI).",
            labels=("share",),
        )
        _add_if_known(stalled, "some", group.stalled_some_s)
        _add_if_known(stalled, "full", group.stalled_full_s)
        yield stalled


class ThreadCollector(Collector):
    """Collects whether the last turns of the supervisor's threads succeeded."""

    def __init__(self, watchdog: SamplingWatchdog) -> None:
        self._watchdog = watchdog

    def collect(self) -> Iterable[Metric]:
        """Yield one sample for each running thread. The main thread has the name ``sampling``."""
        family = GaugeMetricFamily(
            "plimsoll_supervisor_part_ok",
            "1 if the newest turn of this thread of the supervisor succeeded, 0 if it failed.",
            labels=("part",),
        )
        for part, ok in sorted(
            {**read_thread_status(), "sampling": self._watchdog.is_ok()}.items()
        ):
            family.add_metric((part,), int(ok))
        yield family


class OpenFilesCollector(Collector):
    """Collects the engine's open file descriptors. The owner sets the newest reading."""

    def __init__(self) -> None:
        self.newest: OpenFiles | None = None

    def collect(self) -> Iterable[Metric]:
        """Return the metrics for the number and the limit, without a value if unknown."""
        count = GaugeMetricFamily(
            "plimsoll_engine_open_fds",
            "Number of open file descriptors of the engine process that is nearest to its limit.",
        )
        limit = GaugeMetricFamily(
            "plimsoll_engine_max_fds",
            "Limit of open file descriptors of the engine process that is nearest to its limit.",
        )
        if self.newest is not None:
            count.add_metric([], self.newest.open)
            limit.add_metric([], self.newest.limit)
        return count, limit


class ResourceUsageCollector(Collector):
    """Collects what the supervisor itself costs. The launcher is its parent process."""

    def collect(self) -> Iterable[Metric]:
        """Return the resident memory of both processes, and the CPU time of the supervisor."""
        memory = GaugeMetricFamily(
            "plimsoll_supervisor_resident_memory_bytes",
            "Resident memory of the supervisor.",
            labels=("process",),
        )
        for process, pid in (("supervisor", os.getpid()), ("launcher", os.getppid())):
            size = read_resident_memory(pid)
            _add_if_known(memory, process, size.total_bytes if size is not None else None)
        spent = CounterMetricFamily(
            "plimsoll_supervisor_cpu_seconds",
            "CPU time of the supervisor.",
            value=time.process_time(),
        )
        return memory, spent


def _add_if_known(
    family: GaugeMetricFamily | CounterMetricFamily, label: str, value: float | None
) -> None:
    if value is not None:
        family.add_metric((label,), value)


MIN_DEAD_BAND_BYTES = 2 << 20
# Share of the leak budget.
DEAD_BAND_SHARE = 0.01


def compute_dead_band_bytes(budget_bytes: int | None) -> int:
    """Return the dead band in bytes, below which changes of memory are noise.

    ``budget_bytes`` is None without a budget.
    """
    return max(MIN_DEAD_BAND_BYTES, int(DEAD_BAND_SHARE * (budget_bytes or 0)))


class GrowthCounter:
    """Counter of memory growth, computed from a noisy gauge that restarts in each epoch.

    Only increases above the highest value so far, the level, count. If the gauge falls more than
    ``band`` below the level, the level follows at that distance (hysteresis).
    """

    def __init__(self) -> None:
        self._level: int | None = None
        self._epoch: int | None = None

    def compute_increase(self, growth: int, epoch: int, band: int) -> int:
        """Return the bytes to add to the counter.

        ``growth`` is the growth since the baseline of ``epoch``. The first call returns 0, because
        an earlier supervisor may have counted the growth.
        """
        if self._level is None:
            self._level = growth
        elif epoch != self._epoch:
            self._level = 0  # the new epoch has a new baseline
        self._epoch = epoch
        risen = max(0, growth - self._level)
        self._level = min(self._level + risen, growth + band)
        return risen
