"""One leak budget, host or device: what is consumed, how fast, and whether that is suspicious.

The budget is allowed within its window, so growth is measured against the least growth within that
window; against the memory limit it is measured from the baseline on. The worse of the two counts.
"""

from __future__ import annotations

import math
from collections import deque

from plimsoll_api.assessment import BudgetState, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.leak.baseline import Baseline, Warmup
from plimsoll_sidecar.detect.leak.growth import Growth, SegmentDelta, SlidingMinimum, grown_most
from plimsoll_sidecar.detect.leak.odds import odds
from plimsoll_sidecar.detect.leak.suspicion import Hysteresis, Standing, unconfirmed
from plimsoll_sidecar.detect.leak.thresholds import THRESHOLDS
from plimsoll_sidecar.detect.leak.trend import Point, Trend

MIN_RISE_BYTES = 2 << 20
SMOOTH_S = 60.0
"""Growth is averaged over this time, for a low floor alone is noise. A later detector is warm after
it."""
FLOOR_S = 5.0
MAX_RECENT = 64


class LeakBudgetWatch:
    """The state of one budget within one epoch. Without a budget it is watched, never suspected."""

    def __init__(
        self, kind: IncidentKind, budget: MemoryBudget | None, warmup_s: float, interval_s: float
    ) -> None:
        self.kind = kind
        self.budget = budget
        self.state = BudgetState()
        self.baseline: Baseline | None = None
        self._growth_bytes = budget.growth_bytes if budget else None
        self._warmup_s = warmup_s
        self._warmup = Warmup(warmup_s, self._growth_bytes, interval_s)
        self._interval_s = interval_s
        early = THRESHOLDS.early_share * (self._growth_bytes or 0)
        self._min_rise = max(MIN_RISE_BYTES, early / 2)
        self._series = Growth(interval_s, self._min_rise)
        self._segments: dict[Segment, SegmentDelta] = {}
        self._recent: deque[Point] = deque(maxlen=MAX_RECENT)
        self._window = SlidingMinimum(budget.window_s if budget else 0.0)
        self._smooth, self._smoothed_at = 0.0, 0.0
        self._suspected: Hysteresis | None = None
        self._proven_at = -math.inf
        self._in_long_step = False

    def resume(self, bases: list[Point], t: float) -> None:
        """Measure from ``bases``, which an earlier detector found in this epoch.

        Until a trend can have shown itself again this counts as not warm: no suspicion is then no
        good news.
        """
        if bases and self.baseline is None:
            self.baseline = Baseline.of(bases)
            self._warmup.served = True
            self._window.begin(t)
            self._smoothed_at = t
            self._proven_at = t + SMOOTH_S

    def warm(self, t: float) -> bool:
        """Whether growth is known, and that there is none would be known too."""
        return self.baseline is not None and (self._suspected is not None or t >= self._proven_at)

    def update(
        self,
        point: Point,
        sizes: dict[Segment, int],
        ready: bool | None,
        in_long_step: bool,
    ) -> None:
        """Take in a sample's total and the sizes of its segments.

        ``ready`` is what the engine says of itself, None where it says nothing, and
        ``in_long_step`` that one step of it takes unusually long.
        """
        self._in_long_step = in_long_step
        self._first_requests(point)
        if self.baseline is None:
            self.state = BudgetState(current=point.bytes)
            if self._warm_up(point, sizes, ready):
                self._become_warm(point)
            return
        if not self.baseline.settling():
            self._feed(point, sizes)
        self._recent.append(point)
        while point.t - self._recent[0].t > FLOOR_S:
            self._recent.popleft()
        floor = min(self._recent, key=lambda p: p.bytes)
        self.baseline.update(floor)
        growth = self.baseline.growth
        self._window.add(point.t, growth)
        self._smooth += (growth - self._smooth) * min(1.0, (point.t - self._smoothed_at) / SMOOTH_S)
        self._smoothed_at = point.t
        self._judge(point, floor)

    @property
    def grown_segment(self) -> Segment | None:
        """The segment that rose the most, beside declared caches, since its oldest kept floor."""
        return grown_most(self._segments)

    def grown(self, point: Point) -> int:
        """Bytes at ``point`` above what there was, at this load, when the growth began to count."""
        return (self.baseline or self._warmup).grown(point)

    @property
    def suspected_since(self) -> float | None:
        """When the growth that is suspected now began; None where none is."""
        return self._suspected.since if self._suspected is not None else None

    def suspicion(self) -> Suspicion | None:
        """Return what is suspected now. Evidence is the caller's to add."""
        now = self.standing()
        if now is None:
            return None
        state, trend, likely = self.state, now.trend, odds(now.look())
        otherwise, chance = likely.otherwise
        return Suspicion(
            kind=self.kind,
            segment=now.segment,
            confidence=round(likely.chance, 3),
            consumed_ratio=round(now.share, 4),
            bytes=state.unexplained or 0,
            bytes_per_s=trend.bytes_per_s,
            bytes_per_request=trend.bytes_per_request,
            over_budget=now.spent,
            unconfirmed=unconfirmed(now, likely),
            evidence=[
                f"{format_bytes(trend.rise)} in {trend.span_s:.0f} s at comparable load, "
                f"{format_bytes(trend.bytes_per_s * 3600)} an hour",
                f"the chance of a leak is {likely.chance:.1%}; otherwise it is most likely "
                f"{otherwise} ({chance:.1%})",
            ],
        )

    def standing(self) -> Standing | None:
        """Return the growth that is suspected now as it stands; None where none is."""
        suspected, baseline = self._suspected, self.baseline
        if suspected is None or self.budget is None or baseline is None:
            return None
        return Standing(
            state=self.state,
            trend=suspected.trend,
            window_s=self.budget.window_s,
            lived_s=self._smoothed_at - baseline.since,
            segment=self.grown_segment,
            in_long_step=self._in_long_step,
        )

    # ---- one sample

    def _first_requests(self, point: Point) -> None:
        """Begin the warm-up again with the first requests, unless a growth is suspected already.

        Kernels, caches and arenas come with them.
        """
        first = self.baseline is not None and not self._warmup.served and bool(point.requests)
        if first and self._suspected is None:
            self.baseline = None
            self._warmup = Warmup(self._warmup_s, self._growth_bytes, self._interval_s)

    def _warm_up(self, point: Point, sizes: dict[Segment, int], ready: bool | None) -> bool:
        """Take in a sample of the warm-up; return whether it was the last one."""
        warmup = self._warmup
        in_least_time = warmup.floor is None
        ended = warmup.add(point, ready)
        if not warmup.began or (in_least_time and warmup.floor is not None and not warmup.climbing):
            # What comes before and within the least time is no evidence of growth after it.
            self._series = Growth(self._interval_s, self._min_rise)
            self._segments.clear()
        if warmup.began:
            self._feed(point, sizes)
        return ended

    def _feed(self, point: Point, sizes: dict[Segment, int]) -> None:
        self._series.add(point)
        for segment, size in sizes.items():
            delta = self._segments.get(segment)
            if delta is None:
                delta = self._segments[segment] = SegmentDelta(self._interval_s)
            delta.add(Point(point.t, size, point.declared))

    def _become_warm(self, point: Point) -> None:
        warmup = self._warmup
        floor = warmup.floor or point
        settled = None if warmup.climbing else warmup.settled_load(point)
        self.baseline = Baseline(floor, settled)
        self._window.begin(floor.t)
        if not warmup.climbing:
            # The climb of the warm-up is no evidence of growth after it.
            self._series.forget_rises()
            for delta in self._segments.values():
                delta.forget()

    def _judge(self, point: Point, floor: Point) -> None:
        assert self.baseline is not None
        growth, trend = self.baseline.growth, self._series.trend()
        self.state = BudgetState(
            current=floor.bytes,
            baseline=self.baseline.base,
            explained=self.baseline.explained,
            unexplained=max(0, growth),
            bytes_per_s=trend.bytes_per_s if trend else None,
        )
        if self.budget is None:
            return
        spent = max(0, growth - self._window.minimum())
        left = self.budget.growth_bytes - spent
        ratio = spent / self.budget.growth_bytes
        limit = self.budget.limit_bytes
        if limit is not None:
            room = max(1, limit - self.baseline.base)
            ratio = max(ratio, max(0, growth) / room)
            left = min(left, limit - floor.bytes)
        self.state.consumed_ratio = ratio
        if trend is not None:
            self.state.exhaustion_s = max(0.0, left / trend.bytes_per_s)
        self._follow(point, trend, ratio)

    # ---- suspicion

    def _follow(self, point: Point, trend: Trend | None, ratio: float) -> None:
        sound = trend if trend is not None and self._persistent(trend, ratio) else None
        if self._suspected is None:
            if sound is not None:
                self._suspected = Hysteresis(sound, point, self._smooth)
        elif not self._suspected.stands(point, sound, self._smooth):
            self._suspected = None

    def _persistent(self, trend: Trend, ratio: float) -> bool:
        """Whether enough of the budget has gone, for how soon the rest will."""
        assert self.budget is not None
        exhaustion, at = self.state.exhaustion_s, THRESHOLDS
        in_time = self.budget.window_s if trend.span_s >= at.slow_s else at.soon_s
        early = exhaustion is not None and exhaustion <= in_time
        need = at.early_share if early else at.suspect_share
        return ratio >= need and trend.rise >= need / 2 * self.budget.growth_bytes
