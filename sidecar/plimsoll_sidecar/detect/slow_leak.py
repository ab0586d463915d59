"""Find growth that stays within its budget but does not stop, and predict when it hits the limit.

Each hour has twelve cells. A level is the mean of the cells' minimum sizes, and two adjacent levels
are merged into one of twice the duration. Student's t-test on the steps between a few long levels
is valid for random walks and for noise (Ibragimov and Müller 2010). The error of a fitted line
would be far too small.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

import msgspec

from plimsoll_api.assessment import Segment, SlowGrowth
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.trace import Sample
from plimsoll_api.units import DAY_S

HOUR_S = 3600.0
CELL_WIDTH_S = 300.0
"""Width of a cell, which is longer than a burst of requests and most garbage collections."""
CELLS_PER_LEVEL = 12
NUM_SCALES = 7
"""Number of scales: levels of 1, 2, 4, ... 64 hours, and windows of up to six weeks."""
MIN_STEPS, MAX_STEPS = 8, 16
"""Number of steps in a test; the maximum is twice the minimum, so that some scale fits."""
RAISE_QUANTILE = 5.408
"""Quantile of Student's t (7 degrees of freedom, 1 in 2,000). With two tests per hour, a random
walk without drift is raised in at most 1 of 1,000 hours."""
CLEAR_QUANTILE = 1.895
"""Quantile for 1 in 20, which clears a leak."""
RANDOM_WALK_ERROR_FACTOR = 1.28
"""Factor on the quantile for 8 steps (2·10⁵ simulated walks): steps between averages of a random
walk correlate by a quarter (Working, Econometrica 28, 1960)."""
MIN_RISE_BYTES = 8 << 20
"""Minimum rise of a leak: twice the rise of settled memory."""
MIN_STEADY_RATIO = 0.7
"""Minimum ratio of the halves of a rise, which a cache reaches that fills with a time constant of
1.4 windows."""
MAX_FORECAST_FACTOR = 4.0
"""Maximum length of a forecast, as a multiple of the time of observation."""
MIN_UNLIMITED_WATCH_S = DAY_S
"""Duration of the observation from which a forecast may reach any distance ahead. A shorter one may
show only the daily cycle."""


class Level(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Mean growth in bytes of one block of hours, and its mean time in seconds."""

    t: float
    bytes: float


class SlowState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State with which a restarted supervisor continues to watch, in the same epoch.

    Each scale has its ``levels``, oldest first, and in ``halves`` one that waits for the next.
    ``peaks`` are the highest floors of the last hours in bytes.
    """

    levels: list[list[Level]] = []
    halves: list[Level | None] = []
    peaks: list[int] = []
    raised: bool = False


@dataclass(frozen=True, slots=True)
class Drift:
    """Mean pace of a series of steps, with its standard error.

    ``rise`` is in bytes. It ``fades`` if the later half brought much less than the earlier one.
    """

    bytes_per_s: float
    error: float
    rise: float
    span_s: float
    fades: bool

    @property
    def t_statistic(self) -> float:
        """Student's t statistic of the pace against zero; infinite if the error is zero."""
        return self.bytes_per_s / self.error if self.error else math.copysign(math.inf, self.rise)

    def is_significant(self, quantile: float) -> bool:
        """Report whether the pace is above zero at this quantile of Student's t."""
        return self.bytes_per_s > quantile * self.error


def estimate_drift(levels: Sequence[Level]) -> Drift | None:
    """Return the drift of ``levels``, which are in order of time; None for too few levels."""
    count = len(levels) - 1
    span = levels[-1].t - levels[0].t if count >= MIN_STEPS else 0.0
    if span <= 0:
        return None
    steps = [later.bytes - earlier.bytes for earlier, later in pairwise(levels)]
    half = count // 2
    earlier, later = sum(steps[:half]), sum(steps[-half:])
    per_s = count / span
    return Drift(
        bytes_per_s=fmean(steps) * per_s,
        error=RANDOM_WALK_ERROR_FACTOR * stdev(steps) / math.sqrt(count) * per_s,
        rise=sum(steps),
        span_s=span,
        fades=later < MIN_STEADY_RATIO * earlier,
    )


class SlowLeakWatch:
    """Search for slow growth of one kind of memory after the warm-up.

    ``drift`` is the growth that does not stop, or None; ``peak`` the highest floor of the last day
    in bytes. Both change once per hour.
    """

    def __init__(self) -> None:
        self.drift: Drift | None = None
        self.peak: int | None = None
        self.state = SlowState()
        self._levels: list[deque[Level]] = [deque(maxlen=MAX_STEPS + 1) for _ in range(NUM_SCALES)]
        self._halves: list[Level | None] = [None] * NUM_SCALES
        self._lows: list[Level] = []
        self._peaks: deque[int] = deque(maxlen=int(DAY_S / HOUR_S))
        self._highest = 0
        self._cell: int | None = None
        self._low = Level(0.0, 0.0)

    def add(self, t: float, growth: int, floor: int, limit: int | None) -> bool:
        """Add a sample in bytes, and report whether the result was updated, once per hour.

        ``floor`` is the lowest total memory of the last seconds. ``limit`` is None if unknown.
        """
        cell = int(t // CELL_WIDTH_S)
        self._highest = max(self._highest, floor)
        if cell == self._cell:
            if growth < self._low.bytes:
                self._low = Level(t, float(growth))
            return False
        if self._cell is not None:
            self._lows.append(self._low)
        self._cell, self._low = cell, Level(t, float(growth))
        if len(self._lows) < CELLS_PER_LEVEL:
            return False
        self._peaks.append(self._highest)
        self._highest = floor
        self._add_level(0, _average_levels(self._lows))
        self._lows.clear()
        self._update_drift(limit)
        return True

    def make_report(self, limit: int | None, segment: Segment | None) -> SlowGrowth | None:
        """Return the result, for growth in ``segment``; None if the watch is too short for one."""
        if len(self._levels[0]) <= MIN_STEPS or self.peak is None:
            return None
        if self.drift is None:
            return SlowGrowth()
        pace = self.drift.bytes_per_s
        left_s = None if limit is None else round(max(0, limit - self.peak) / pace, 1)
        return SlowGrowth(True, segment, round(pace, 3), left_s)

    def resume(self, state: SlowState, t: float, limit: int | None) -> None:
        """Continue at ``t`` from the state of an earlier watch in the same epoch.

        The clocks differ, so all levels are shifted: the newest hour ends at ``t``.
        """
        if not state.levels or not state.levels[0] or not state.peaks:
            return
        offset = t - HOUR_S / 2 - state.levels[0][-1].t

        def shift(level: Level) -> Level:
            return Level(level.t + offset, level.bytes)

        for mine, theirs in zip(self._levels, state.levels, strict=False):
            mine.extend(map(shift, theirs))
        for index, half in enumerate(state.halves[:NUM_SCALES]):
            self._halves[index] = None if half is None else shift(half)
        self._peaks.extend(state.peaks)
        self._update_drift(limit, state.raised)

    def _add_level(self, scale: int, level: Level) -> None:
        self._levels[scale].append(level)
        if scale + 1 == NUM_SCALES:
            return
        half, self._halves[scale] = self._halves[scale], level
        if half is not None:
            self._halves[scale] = None
            self._add_level(scale + 1, _average_levels((half, level)))

    def _update_drift(self, limit: int | None, was_raised: bool = False) -> None:
        self.peak = max(self._peaks)
        headroom = None if limit is None else max(0, limit - self.peak)
        self.drift = self._find_drift(headroom, was_raised or self.drift is not None)
        self.state = SlowState(
            levels=[list(levels) for levels in self._levels],
            halves=list(self._halves),
            peaks=list(self._peaks),
            raised=self.drift is not None,
        )

    def _find_drift(self, headroom: int | None, was_raised: bool) -> Drift | None:
        """Return the growth over the window with the most certain leak; None without a leak."""
        drifts = [drift for levels in self._levels if (drift := estimate_drift(list(levels)))]
        if was_raised:
            leaks = [drift for drift in drifts if _is_steady(drift, CLEAR_QUANTILE)]
        elif any(drift.is_significant(CLEAR_QUANTILE) and drift.fades for drift in drifts):
            return None
        else:
            leaks = [drift for drift in drifts if _is_leak(drift, headroom)]
        return max(leaks, key=lambda drift: drift.t_statistic, default=None)


def _is_leak(drift: Drift, headroom: int | None) -> bool:
    if not _is_steady(drift, RAISE_QUANTILE):
        return False
    if drift.span_s >= MIN_UNLIMITED_WATCH_S:
        return True
    return (
        headroom is not None and MAX_FORECAST_FACTOR * drift.span_s >= headroom / drift.bytes_per_s
    )


def _is_steady(drift: Drift, quantile: float) -> bool:
    return drift.rise >= MIN_RISE_BYTES and drift.is_significant(quantile) and not drift.fades


def _average_levels(levels: Sequence[Level]) -> Level:
    return Level(
        round(fmean(level.t for level in levels), 1),
        round(fmean(level.bytes for level in levels), 1),
    )


def find_memory_limit(
    memory: str, budget: MemoryBudget | None, sample: Sample, shared: bool
) -> int | None:
    """Return the limit of ``memory`` ("host" or "device") in bytes; None if it is unknown."""
    configured = None if budget is None else budget.limit_bytes
    if memory == "host":
        known = [limit for limit in (configured, sample.host.cgroup_limit) if limit]
        return min(known, default=None)
    if configured is not None:
        return configured
    if shared or not sample.device:
        return None
    sizes = [device.total for device in sample.device if device.total]
    return sum(sizes) if len(sizes) == len(sample.device) else None
