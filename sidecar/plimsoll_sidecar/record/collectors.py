"""Collectors of metrics that are more than a value: newest readings, and a counter of growth."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.trace import OpenFiles
from plimsoll_sidecar.background import Sampling, parts_ok
from plimsoll_sidecar.signals.cgroup import CgroupMemory

PREFIX = "plimsoll_cgroup_memory"
KINDS = (
    "current", "anon", "shmem", "file", "slab", "kernel", "sock", "other", "reclaimable", "swap",
    "limit",
)  # fmt: skip


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
        for kind in KINDS:
            _add(sizes, kind, getattr(group, kind))
        yield sizes
        share = GaugeMetricFamily(
            f"{PREFIX}_limit_ratio",
            "Share of the group's limit that is in use and cannot be reclaimed.",
        )
        if group.limit_ratio is not None:
            share.add_metric([], group.limit_ratio)
        yield share
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
    """Whether the supervisor's threads succeed in their work, the main one (``sampling``) too."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def collect(self) -> Iterable[Metric]:
        """Yield one sample for each part that runs."""
        family = GaugeMetricFamily(
            "plimsoll_supervisor_part_ok",
            "1 where the newest turn of this part of the supervisor succeeded, 0 where it failed.",
            labels=("part",),
        )
        for part, ok in sorted({**parts_ok(), "sampling": self._sampling.ok()}.items()):
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


MIN_BAND_BYTES = 2 << 20
BAND_RATIO = 0.01


def band_of(budget_bytes: int | None) -> int:
    """Return the dead band for a budget: noise below a hundredth of it is nobody's concern."""
    return max(MIN_BAND_BYTES, int(BAND_RATIO * (budget_bytes or 0)))


class Ratchet:
    """A counter of growth out of a gauge that is noisy and starts anew with each epoch.

    Burn rates need a counter: ``increase()`` over any range, across restarts. Summing every rise of
    a noisy gauge would count its noise for ever, so a rise counts only above the level that was
    reached, and that level follows the gauge down no closer than ``band`` (a dead band, as in a
    thermostat).
    """

    def __init__(self) -> None:
        self._level: int | None = None
        self._epoch: int | None = None

    def rise(self, growth: int, epoch: int, band: int) -> int:
        """``growth`` bytes since the baseline of ``epoch``.

        The first value that is ever seen may be an older supervisor's: it counts as the level.
        """
        if self._level is None:
            self._level = growth
        elif epoch != self._epoch:
            self._level = 0  # a new baseline, measured from the new epoch's warm-up
        self._epoch = epoch
        risen = max(0, growth - self._level)
        self._level = min(self._level + risen, growth + band)
        return risen
