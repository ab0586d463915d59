"""Export metrics with more than one value, and count growth."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.trace import OpenFiles
from plimsoll_sidecar.background import SamplingWatchdog, read_thread_status
from plimsoll_sidecar.signals.cgroup import CgroupMemory

CGROUP_PREFIX = "plimsoll_cgroup_memory"
CGROUP_KINDS = (
    "current", "anon", "shmem", "file", "slab", "kernel", "sock", "other", "reclaimable", "swap",
    "limit",
)  # fmt: skip
"""Fields of :class:`CgroupMemory` that are exported as ``kind``."""


class CgroupCollector(Collector):
    """Memory of the engine's cgroup. ``newest`` returns the newest reading."""

    def __init__(self, newest: Callable[[], CgroupMemory]) -> None:
        self._newest = newest

    def collect(self) -> Iterable[Metric]:
        """Yield sizes in bytes, event counts and stall seconds, as of the newest sample."""
        group = self._newest()
        sizes = GaugeMetricFamily(
            f"{CGROUP_PREFIX}_bytes", "Memory of the engine's cgroup by kind.", labels=("kind",)
        )
        for kind in CGROUP_KINDS:
            _add_if_known(sizes, kind, getattr(group, kind))
        yield sizes
        share = GaugeMetricFamily(
            f"{CGROUP_PREFIX}_limit_ratio",
            "Share of the cgroup's limit that is in use and not reclaimable.",
        )
        if group.limit_ratio is not None:
            share.add_metric([], group.limit_ratio)
        yield share
        events = CounterMetricFamily(
            f"{CGROUP_PREFIX}_events",
            "Events of the cgroup: throttled above memory.high, out of memory, process killed.",
            labels=("event",),
        )
        _add_if_known(events, "high", group.throttled)
        _add_if_known(events, "oom", group.ooms)
        _add_if_known(events, "oom_kill", group.oom_kills)
        yield events
        stalled = CounterMetricFamily(
            f"{CGROUP_PREFIX}_stalled_seconds",
            "Time that some or all tasks of the cgroup waited for memory (PSI).",
            labels=("share",),
        )
        _add_if_known(stalled, "some", group.stalled_some_s)
        _add_if_known(stalled, "full", group.stalled_full_s)
        yield stalled


class ThreadCollector(Collector):
    """Status of the supervisor's threads: whether their last unit of work succeeded."""

    def __init__(self, sampling: SamplingWatchdog) -> None:
        self._sampling = sampling

    def collect(self) -> Iterable[Metric]:
        """Yield one sample for each running thread; ``sampling`` is the main thread."""
        family = GaugeMetricFamily(
            "plimsoll_supervisor_part_ok",
            "1 if the newest turn of this thread of the supervisor succeeded, 0 if it failed.",
            labels=("part",),
        )
        for part, ok in sorted(
            {**read_thread_status(), "sampling": self._sampling.is_ok()}.items()
        ):
            family.add_metric((part,), int(ok))
        yield family


class OpenFilesCollector(Collector):
    """Open file descriptors of the engine, from the newest reading."""

    def __init__(self) -> None:
        self.newest: OpenFiles | None = None

    def collect(self) -> Iterable[Metric]:
        """Yield the count and the limit, without samples if they are unknown."""
        count = GaugeMetricFamily(
            "plimsoll_engine_open_fds",
            "Open file descriptors of the engine's process that is nearest to its limit.",
        )
        limit = GaugeMetricFamily(
            "plimsoll_engine_max_fds",
            "Limit of open file descriptors of the engine's process that is nearest to it.",
        )
        if self.newest is not None:
            count.add_metric([], self.newest.open)
            limit.add_metric([], self.newest.limit)
        return count, limit


def _add_if_known(
    family: GaugeMetricFamily | CounterMetricFamily, label: str, value: float | None
) -> None:
    if value is not None:
        family.add_metric((label,), value)


MIN_DEAD_BAND_BYTES = 2 << 20
"""Minimum dead band in bytes."""
DEAD_BAND_RATIO = 0.01
"""Dead band as a share of the leak budget."""


def compute_dead_band_bytes(budget_bytes: int | None) -> int:
    """Return the dead band of a leak budget in bytes. Smaller changes are noise."""
    return max(MIN_DEAD_BAND_BYTES, int(DEAD_BAND_RATIO * (budget_bytes or 0)))


class GrowthCounter:
    """Counter of growth, computed from a noisy gauge that starts again in each epoch.

    Burn rates need a counter, for ``increase()`` over any range and across restarts. The sum of all
    rises of a noisy gauge would include its noise. A rise therefore counts only above the highest
    level so far. That level follows the gauge down, but stays at most ``band`` above it
    (hysteresis).
    """

    def __init__(self) -> None:
        self._level: int | None = None
        self._epoch: int | None = None

    def count_new(self, growth: int, epoch: int, band: int) -> int:
        """Return how many of the ``growth`` bytes since the baseline of ``epoch`` are new.

        The first value only sets the level, because an earlier supervisor may have counted it.
        """
        if self._level is None:
            self._level = growth
        elif epoch != self._epoch:
            self._level = 0  # the new epoch has a new baseline
        self._epoch = epoch
        risen = max(0, growth - self._level)
        self._level = min(self._level + risen, growth + band)
        return risen
