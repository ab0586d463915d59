"""Growth that stays within its budget and does not stop: how fast, and how long until the limit.

The input is growth at comparable load that no ledger explains. An hour is one *level*: the mean of
the lows of its twelve five-minute cells, which garbage and bursts do not raise. Levels of two hours
are made of those of one, and so on up to 64 hours, so that weeks need some hundred numbers.

Memory is closer to a random walk than to independent noise, which makes a fitted line look far too
certain. The steps from one level to the next are tested instead: those of a random walk are
independent, and those of noise around a constant are negatively correlated, which makes the test
careful. Student's t over few large blocks is valid for both, and for steps of unequal variance
(Ibragimov and Müller, "t-Statistic Based Correlation and Heterogeneity Robust Inference", Journal
of Business & Economic Statistics 28, 2010).
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
from plimsoll_sidecar.detect.thresholds import THRESHOLDS

HOUR_S = 3600.0
LOW_S = 300.0
"""Width of a cell: longer than a burst of requests, and than most rounds of a collector."""
LOWS = 12
"""Cells of a level."""
SCALES = 7
"""Levels of 1, 2, 4 … 64 hours: the widest window is six weeks, longer than pods live."""
MIN_STEPS, MAX_STEPS = 8, 16
"""Steps that are tested. Twice the least, so that each span is covered by some scale."""
RAISED_T = 5.408
"""Student's t for 7 degrees of freedom and one chance in 2,000. Two tests or so come an hour: by
the union bound, at most one in 1,000 hours raises a random walk without drift."""
LIKELY_T = 1.895
"""The same for one chance in 20: it decides when a leak clears, and how wide a forecast is."""
RANDOM_WALK = 1.28
"""Steps between *averages* of a random walk correlate by a quarter (Working, "Note on the
Correlation of First Differences of Averages in a Random Chain", Econometrica 28, 1960). For 8
steps, the quantile above needs this factor (2·10⁵ simulated walks)."""
MIN_RISE_BYTES = 8 << 20
"""Twice what counts as settled: allocators take memory in steps of 1 MiB."""
REACH = 4.0
"""A forecast reaches no further than so many times as long as the growth was watched …"""
ENOUGH_S = DAY_S
"""… unless it was watched for a day: less may be the day's rhythm."""


class Level(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The level of one block: its mean time, and its mean growth in bytes."""

    t: float
    bytes: float


class SlowState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a later watch of the same epoch needs.

    ``levels`` holds those of each scale, oldest first, ``halves`` the one of each that waits for
    its neighbour. ``peaks`` are the highest floors of the last hours, in bytes. The hour that has
    not ended is not kept: a state changes once an hour.
    """

    levels: list[list[Level]] = []
    halves: list[Level | None] = []
    peaks: list[int] = []
    raised: bool = False


@dataclass(frozen=True, slots=True)
class Drift:
    """The mean of some steps, in bytes a second, and its standard error.

    ``rise`` is their sum in bytes, ``fading`` the rise of the later half as a share of that of the
    earlier one (infinite where that did not rise).
    """

    bytes_per_s: float
    error: float
    rise: float
    span_s: float
    fading: float

    def lower(self, t: float) -> float:
        """Return the confidence bound from below, for a quantile ``t``."""
        return self.bytes_per_s - t * self.error

    def upper(self, t: float) -> float:
        """Return the confidence bound from above, for a quantile ``t``."""
        return self.bytes_per_s + t * self.error

    @property
    def certainty(self) -> float:
        """Return Student's t of the rate against none."""
        return self.bytes_per_s / self.error if self.error else math.inf


def drift(levels: Sequence[Level]) -> Drift | None:
    """Return the drift of levels in order of time; None where there are too few."""
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
        error=RANDOM_WALK * stdev(steps) / math.sqrt(count) * per_s,
        rise=sum(steps),
        span_s=span,
        fading=later / earlier if earlier > 0 else math.inf,
    )


class SlowLeakWatch:
    """One memory in one epoch, from the end of the warm-up on.

    ``found`` is the growth that does not stop, None where there is none, and ``peak`` the highest
    floor of the last day in bytes. Both change once an hour.
    """

    def __init__(self) -> None:
        self.found: Drift | None = None
        self.peak: int | None = None
        self.state = SlowState()
        self._levels: list[deque[Level]] = [deque(maxlen=MAX_STEPS + 1) for _ in range(SCALES)]
        self._halves: list[Level | None] = [None] * SCALES
        self._lows: list[Level] = []
        self._peaks: deque[int] = deque(maxlen=int(DAY_S / HOUR_S))
        self._highest = 0
        self._cell: int | None = None
        self._low = Level(0.0, 0.0)

    @property
    def known(self) -> bool:
        """Whether the memory was watched for long enough to judge it."""
        return len(self._levels[0]) > MIN_STEPS

    @property
    def begun(self) -> bool:
        """Whether a sample was taken in, or the hours of an earlier watch."""
        return self._cell is not None or self.peak is not None

    def add(self, t: float, growth: int, floor: int, limit: int | None) -> bool:
        """Take in a sample: its growth, and the floor of all memory, in bytes.

        ``limit`` is where the memory ends, None where unknown. True once an hour, when all is
        judged again.
        """
        cell = int(t // LOW_S)
        self._highest = max(self._highest, floor)
        if cell == self._cell:
            if growth < self._low.bytes:
                self._low = Level(t, float(growth))
            return False
        if self._cell is not None:
            self._lows.append(self._low)
        self._cell, self._low = cell, Level(t, float(growth))
        if len(self._lows) < LOWS:
            return False
        self._peaks.append(self._highest)
        self._highest = floor
        self._push(0, _mean(self._lows))
        self._lows.clear()
        self._judge(limit)
        return True

    def resume(self, state: SlowState, t: float, limit: int | None) -> None:
        """Go on at ``t`` from what an earlier watch found in the same epoch.

        Its clock began elsewhere: the newest hour moves to the one before ``t``, and the others
        with it.
        """
        if not state.levels or not state.levels[0] or not state.peaks:
            return
        by = t - HOUR_S / 2 - state.levels[0][-1].t
        for mine, theirs in zip(self._levels, state.levels, strict=False):
            mine.extend(_moved(level, by) for level in theirs)
        for index, half in enumerate(state.halves[:SCALES]):
            self._halves[index] = None if half is None else _moved(half, by)
        self._peaks.extend(state.peaks)
        self._judge(limit, state.raised)

    # ---- levels

    def _push(self, scale: int, level: Level) -> None:
        self._levels[scale].append(level)
        if scale + 1 == SCALES:
            return
        half = self._halves[scale]
        if half is None:
            self._halves[scale] = level
            return
        self._halves[scale] = None
        self._push(scale + 1, _mean((half, level)))

    # ---- judging

    def _judge(self, limit: int | None, raised: bool = False) -> None:
        self.peak = max(self._peaks)
        room = None if limit is None else max(0, limit - self.peak)
        self.found = self._best(room, raised or self.found is not None)
        self.state = SlowState(
            levels=[list(levels) for levels in self._levels],
            halves=list(self._halves),
            peaks=list(self._peaks),
            raised=self.found is not None,
        )

    def _best(self, room: int | None, raised: bool) -> Drift | None:
        """Return the most certain drift of all scales that neither fades nor has stopped.

        It has stopped when the last steps of a shorter scale are slower than half of it.
        """
        scales = [list(levels) for levels in self._levels]
        wholes = [found for levels in scales if (found := drift(levels))]
        lasts = [found for levels in scales if (found := drift(levels[-MIN_STEPS - 1 :]))]
        fades = any(one.lower(LIKELY_T) > 0 and one.fading < 1 / 2 for one in wholes)
        best: Drift | None = None
        for number, whole in enumerate(wholes):
            slow = whole.bytes_per_s / 2
            if any(one.upper(LIKELY_T) < slow for one in lasts[: number + 1]):
                continue
            grows = _keeps(whole) if raised else not fades and _rises(whole, room)
            if grows and (best is None or whole.certainty > best.certainty):
                best = whole
        return best


def _rises(seen: Drift, room: int | None) -> bool:
    """Return whether the drift is a leak, with ``room`` bytes left."""
    if seen.rise < MIN_RISE_BYTES or seen.lower(RAISED_T) <= 0 or seen.fading < THRESHOLDS.steady:
        return False
    if seen.span_s >= ENOUGH_S:
        return True
    return room is not None and REACH * seen.span_s >= room / seen.bytes_per_s


def _keeps(seen: Drift) -> bool:
    """Return whether a drift that was raised before still counts as a leak."""
    return seen.rise >= MIN_RISE_BYTES and seen.lower(LIKELY_T) > 0 and seen.fading >= 1 / 2


def _mean(levels: Sequence[Level]) -> Level:
    return Level(
        round(fmean(one.t for one in levels), 1), round(fmean(one.bytes for one in levels), 1)
    )


def _moved(level: Level, by: float) -> Level:
    return Level(level.t + by, level.bytes)


def limit_of(memory: str, budget: MemoryBudget | None, sample: Sample, shared: bool) -> int | None:
    """Return the limit of ``memory`` in bytes; None if it is unknown.

    A device ends with its size, unless others use it too (``shared``).
    """
    set_by = [] if budget is None or budget.limit_bytes is None else [budget.limit_bytes]
    if memory == "host":
        group = sample.host.cgroup_limit
        return min([*set_by, *([group] if group else [])], default=None)
    if set_by:
        return set_by[0]
    if shared or not sample.device:
        return None
    sizes = [device.total for device in sample.device if device.total]
    return sum(sizes) if len(sizes) == len(sample.device) else None


def slow_growth(
    found: Drift | None, peak: int | None, limit: int | None, segment: Segment | None, why: str
) -> SlowGrowth:
    """Return the report on ``found``, which is None if nothing grows.

    ``peak`` is the highest floor of the last day, ``why`` says why there is no ``limit``.
    """
    if found is None:
        return SlowGrowth()
    slowest, fastest = max(0.0, found.lower(LIKELY_T)), found.upper(LIKELY_T)
    room = max(0, limit - peak) if limit is not None and peak is not None else None

    def lasts(rate: float) -> float | None:
        return None if room is None or rate <= 0 else round(room / rate, 1)

    return SlowGrowth(
        slow_leak=True,
        segment=segment,
        bytes_per_s=round(found.bytes_per_s, 3),
        slowest=round(slowest, 3),
        fastest=round(fastest, 3),
        span_s=round(found.span_s, 1),
        limit=limit,
        limit_s=lasts(found.bytes_per_s),
        limit_earliest_s=lasts(fastest),
        limit_latest_s=lasts(slowest),
        no_time=why if room is None else None,
    )
