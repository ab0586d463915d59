"""One leak budget, host or device: what is consumed, how fast, and whether that is suspicious.

The budget is allowed within its window, so growth is measured against the least growth within that
window; against the memory limit it is measured from the baseline on. The worse of the two counts.
"""

from __future__ import annotations

import math
from collections import deque

from plimsoll_api.supervision import Budget
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.assessment import BudgetState, Kind, Segment, Suspicion
from plimsoll_sidecar.detect.baseline import Baseline, Warmup
from plimsoll_sidecar.detect.growth import Growth
from plimsoll_sidecar.detect.rise import Rise
from plimsoll_sidecar.detect.trend import Point, Trend

SUSPECT_RATIO = 0.25
FAST_RATIO, FAST_EXHAUSTION_S = 0.08, 120.0
"""A budget that would be spent within two minutes is worth a word at a twelfth of it."""
SLOW_RATIO, SLOW_CONFIDENCE, SLOW_SPAN_S = 0.06, 0.85, 1200.0
"""A trend that held for twenty minutes and spends the budget within its window is, too."""
MIN_RISE_RATIO = SLOW_RATIO / 2
MIN_RISE_BYTES = 2 << 20
REACTION_S = 30.0
"""Drain, restart and warm-up of a worker: a budget that is spent sooner is as good as spent."""
REACTION_RATIO = 0.8
CLEAR_SHARE = 0.5
"""A suspicion ends when this share of the growth it stood on has come back."""
CLEAR_SPANS = 3.0
CLEAR_LEAST_S = 60.0
SMOOTH_S = 60.0
"""Growth is averaged over this time before it clears a suspicion: a low floor alone is noise."""
MIN_CONFIDENCE = 0.65
BELIEF_RATIO = 0.8
"""Whatever a growth may be: one that has spent this share of the budget is believed."""
BELIEF_FACTOR = 2.0
"""Before that it must become this multiple of what raised the suspicion: what an allocator keeps
after a burst does not."""
COLLECTION_ROUNDS = 2
"""Full collections that a growth must outlast."""
OUTLAST_FACTOR = 1.25
"""A slow trend that outlasted them is believed when it became this multiple of what it was."""
BELIEF_LEAST = 0.47
"""Heat after a restart, graphs that are captured late, pools that follow the load: what is bounded
and undeclared ends below this share of a budget that was set with thought."""
LIFE_SHARE = 0.5
"""A defect leaks from the begin. Growth whose present pace explains less than this share of the
engine's life began later: most of that is work which ends, such as a batch or a profile."""
REUSABLE = frozenset({Segment.MALLOC_RETAINED, Segment.TORCH_RESERVED_UNUSED})
"""What an allocator holds unused, and gives back or uses again in the end."""
CLEAN_FACTOR, CLEAN_TAU, CLEAN_SPAN_S, CLEAN_RATIO = 50.0, 0.95, 2400.0, 0.085
"""A trend that is straight for long, without noise and without steps, is believed earlier, if the
budget would not last for its window."""
BELIEF_FADING, FADED = 0.65, 1.5
"""The same for growth that gets slower, within its trend or by this factor since the begin: it
fills something up."""
URGENT_S, URGENT_LEAST_S = 150.0, 30.0
"""A budget that is spent sooner leaves no time for doubt, once the growth has lasted this long or
has spent most of it: a few large requests need much memory, but for seconds."""
PACE = 0.3
"""A forecast is urgent only while the last seconds keep up this share of the trend's pace."""
FLOOR_S = 5.0
RECENT_S = 15.0
MAX_RECENT = 64
WINDOW_SLOTS = 48


class BudgetWatch:
    """The state of one budget within one epoch. Without a budget it is watched, never suspected."""

    def __init__(
        self, kind: Kind, budget: Budget | None, warmup_s: float, interval_s: float
    ) -> None:
        self.kind = kind
        self.budget = budget
        self.state = BudgetState()
        self.baseline: Baseline | None = None
        self._growth_bytes = budget.growth_bytes if budget else None
        self._warmup_s = warmup_s
        self._warmup = Warmup(warmup_s, self._growth_bytes, interval_s)
        self._interval_s = interval_s
        min_rise = max(MIN_RISE_BYTES, MIN_RISE_RATIO * (self._growth_bytes or 0))
        self._series = Growth(interval_s, min_rise)
        self._segments: dict[Segment, Rise] = {}
        self._recent: deque[Point] = deque(maxlen=MAX_RECENT)
        self._growths: deque[tuple[float, int]] = deque(maxlen=MAX_RECENT)
        self._window = SlidingLeast(budget.window_s if budget else 0.0)
        self._smooth, self._smoothed_at = 0.0, 0.0
        self._suspected: _Latch | None = None
        self._proven_at = -math.inf
        self._in_long_step = False

    def resume(self, bases: list[Point], t: float) -> None:
        """Measure from ``bases``, which an earlier detector found in this epoch. Until a trend can
        have shown itself again this counts as not warm: no suspicion is then no good news."""
        if bases and self.baseline is None:
            self.baseline = Baseline.of(bases)
            self._warmup.served = True
            self._window.begin(t)
            self._smoothed_at = t
            self._proven_at = t + CLEAR_LEAST_S

    def warm(self, t: float) -> bool:
        """Whether growth is known, and that there is none would be known too."""
        return self.baseline is not None and (self._suspected is not None or t >= self._proven_at)

    def update(
        self,
        point: Point,
        sizes: dict[Segment, int],
        ready: bool | None = None,
        in_long_step: bool = False,
    ) -> None:
        """Takes in a sample's total and the sizes of its segments; ``ready`` is what the engine
        says of itself, None where it says nothing."""
        self._in_long_step = in_long_step
        self._first_requests(point)
        if self.baseline is None:
            self.state = BudgetState(current=point.bytes)
            warm = self._warmup.add(point, ready)
            if self._warmup.floor is not None:
                self._feed(point, sizes)
            if warm:
                self._become_warm(self._warmup.floor or point, self._warmup.climbing)
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
        self._growths.append((point.t, growth))
        while point.t - self._growths[0][0] > RECENT_S:
            self._growths.popleft()
        self._judge(point, floor)

    @property
    def suspected_since(self) -> float | None:
        """When the growth that is suspected now began; None where none is."""
        return self._suspected.since if self._suspected is not None else None

    def suspicion(self) -> Suspicion | None:
        """What is suspected now. Evidence is the caller's to add."""
        latch, state = self._suspected, self.state
        if latch is None or state.consumed_ratio is None:
            return None
        exhaustion, ratio = state.exhaustion_s, state.consumed_ratio
        near = exhaustion is not None and exhaustion <= REACTION_S and ratio >= REACTION_RATIO
        near = near and self._urgent(latch)
        trend, doubt = latch.trend, self._doubt(latch)
        return Suspicion(
            kind=self.kind,
            segment=self._worst_segment(),
            confidence=round(min(1.0, max(0.0, trend.confidence)), 3),
            consumed_ratio=round(ratio, 4),
            bytes=state.unexplained or 0,
            bytes_per_s=trend.bytes_per_s,
            bytes_per_request=trend.bytes_per_request,
            over_budget=ratio >= 1.0 or near,
            doubt=doubt,
            evidence=[
                f"{format_bytes(trend.rise)} in {trend.span_s:.0f} s at comparable load, "
                f"{format_bytes(trend.bytes_per_s * 3600)} an hour",
                *([f"not believed yet: {doubt}"] if doubt else []),
            ],
        )

    # ---- one sample

    def _first_requests(self, point: Point) -> None:
        """Kernels, caches and arenas come with the first requests: warm-up begins again with them,
        unless a growth is suspected already."""
        first = self.baseline is not None and not self._warmup.served and bool(point.requests)
        if first and self._suspected is None:
            self.baseline = None
            self._warmup = Warmup(self._warmup_s, self._growth_bytes, self._interval_s)

    def _feed(self, point: Point, sizes: dict[Segment, int]) -> None:
        self._series.add(point)
        for segment, size in sizes.items():
            rise = self._segments.get(segment)
            if rise is None:
                rise = self._segments[segment] = Rise(self._interval_s)
            rise.add(Point(point.t, size))

    def _become_warm(self, floor: Point, climbing: bool) -> None:
        self.baseline = Baseline(floor)
        self._window.begin(floor.t)
        if not climbing:
            # The climb of the warm-up is no evidence of growth after it.
            self._series.forget_rises()
            for rise in self._segments.values():
                rise.forget()

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
        spent = max(0, growth - self._window.least())
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
        self._latch(point, trend, ratio)

    # ---- suspicion

    def _latch(self, point: Point, trend: Trend | None, ratio: float) -> None:
        sound = trend if trend is not None and self._persistent(trend, ratio) else None
        latch = self._suspected
        if latch is None:
            if sound is not None:
                self._suspected = _Latch(sound, point, self._smooth, self.state.unexplained or 0)
            return
        latch.collected(point)
        if sound is not None:
            latch.trend, latch.seen_at = sound, point.t
            latch.peak = max(latch.peak, self._smooth)
        elif point.load == 0:
            # An idle engine cannot show that a leak driven by requests has ended.
            latch.seen_at += point.t - latch.looked_at
        latch.looked_at = point.t
        patience = max(CLEAR_LEAST_S, CLEAR_SPANS * latch.trend.span_s)
        if self._smooth < CLEAR_SHARE * latch.peak or point.t - latch.seen_at > patience:
            self._suspected = None

    def _doubt(self, latch: _Latch) -> str | None:
        """What else the growth may be. None when it is believed, or when there is no time."""
        growth = max(1, self.state.unexplained or 0)
        # A single floor is noise: what the last minute held on average counts.
        held = min(1.0, self._smooth / growth)
        spent = held * (self.state.consumed_ratio or 0.0)
        if self._urgent(latch) or spent >= BELIEF_RATIO:
            return None
        rounds = latch.rounds
        if rounds is not None and rounds < COLLECTION_ROUNDS:
            return f"garbage, unless it outlasts {COLLECTION_ROUNDS} collections ({rounds} so far)"
        slow = rounds is not None and latch.trend.span_s >= SLOW_SPAN_S
        needed = OUTLAST_FACTOR * latch.begun_smooth if slow else BELIEF_FACTOR * latch.begun
        if held * growth < needed or self._worst_segment() in REUSABLE:
            return "memory that an allocator keeps, unless it goes on"
        if latch.trend.busier:
            return "load that rose with it, unless it goes on"
        life = self._life(latch, growth)
        if life < LIFE_SHARE:
            return "work that began later and ends, unless it goes on"
        fades = latch.trend.fades or life > FADED
        enough = BELIEF_FADING if fades else BELIEF_LEAST
        grows = self.state.bytes_per_s is not None
        if (grows and spent >= enough) or self._straight(latch.trend):
            return None
        return "a warm-up or a cache that is not full yet, unless it goes on"

    def _urgent(self, latch: _Latch) -> bool:
        """Whether the budget goes so fast that there is no time for doubt. What one long step needs
        for itself is no growth yet."""
        exhaustion, ratio = self.state.exhaustion_s, self.state.consumed_ratio or 0.0
        if exhaustion is None or exhaustion > URGENT_S or self._in_long_step:
            return False
        lasted = latch.lasted_s >= URGENT_LEAST_S or ratio >= REACTION_RATIO
        return lasted and self._keeps_pace()

    def _life(self, latch: _Latch, growth: int) -> float:
        """How much of the engine's life the growth explains at its present pace: 1 for a steady
        leak, less for what began later or quickens, more for what gets slower."""
        assert self.baseline is not None
        lived = latch.looked_at - self.baseline.since
        return growth / max(1.0, latch.trend.bytes_per_s * lived)

    def _straight(self, trend: Trend) -> bool:
        """Whether a trend is too straight to end soon, and too steep for the budget."""
        assert self.budget is not None
        exhaustion, ratio = self.state.exhaustion_s, self.state.consumed_ratio or 0.0
        steep = exhaustion is not None and exhaustion <= self.budget.window_s
        clean = trend.confidence >= CLEAN_TAU and trend.rise >= CLEAN_FACTOR * trend.noise
        return steep and clean and trend.span_s >= CLEAN_SPAN_S and ratio >= CLEAN_RATIO

    def _keeps_pace(self) -> bool:
        """Whether the last seconds grew nearly as fast as the trend says."""
        rate = self.state.bytes_per_s
        if rate is None or len(self._growths) < 2:
            return False
        (begin, before), (end, now) = self._growths[0], self._growths[-1]
        return now - before >= PACE * rate * (end - begin)

    def _persistent(self, trend: Trend, ratio: float) -> bool:
        """Whether enough of the budget has gone, for how soon the rest will."""
        assert self.budget is not None
        exhaustion = self.state.exhaustion_s
        need = SUSPECT_RATIO
        if trend.confidence < MIN_CONFIDENCE:
            return False
        if exhaustion is not None:
            slow = trend.confidence >= SLOW_CONFIDENCE and trend.span_s >= SLOW_SPAN_S
            if slow and exhaustion <= self.budget.window_s:
                need = SLOW_RATIO
            elif exhaustion <= FAST_EXHAUSTION_S:
                need = FAST_RATIO
        return ratio >= need and trend.rise >= need / 2 * self.budget.growth_bytes

    def _worst_segment(self) -> Segment | None:
        """The segment that rose the most since its oldest floor that is kept."""
        segments = self._segments
        return max(segments, key=lambda segment: segments[segment].bytes, default=None)


class SlidingLeast:
    """The least growth within a sliding window, in slots of a forty-eighth of it.

    Each slot keeps its mean: the least of many single readings would be noise. The slot that is
    still open does not count, else growth would be measured against itself.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._slot_s = window_s / WINDOW_SLOTS
        self._slots: deque[tuple[float, float, int]] = deque(maxlen=WINDOW_SLOTS + 2)

    def begin(self, t: float) -> None:
        """The baseline is the first slot: no growth yet."""
        self._slots.append((t - self._slot_s, 0.0, 1))

    def add(self, t: float, growth: int) -> None:
        since, mean, count = self._slots[-1]
        if t >= since + self._slot_s:
            self._slots.append((t, float(growth), 1))
        else:
            self._slots[-1] = (since, mean + (growth - mean) / (count + 1), count + 1)
        while len(self._slots) > 2 and self._slots[0][0] < t - self._window_s - self._slot_s:
            self._slots.popleft()

    def least(self) -> int:
        """The smallest mean of the closed slots."""
        means = [mean for _, mean, _ in self._slots]
        return int(min(means[:-1] or means))


class _Latch:
    """A suspicion that stands, and the newest trend that it stands on."""

    def __init__(self, trend: Trend, point: Point, smooth: float, growth: int) -> None:
        self.trend = trend
        self.since = point.t - trend.span_s
        self.begun, self.begun_smooth, self.peak = growth, smooth, smooth
        self.seen_at = self.looked_at = point.t
        self.rounds = None if point.collections is None else 0
        self._collections = point.collections

    @property
    def lasted_s(self) -> float:
        return self.looked_at - self.since

    def collected(self, point: Point) -> None:
        """Counts the full collections since the suspicion; one that is unknown counts for none."""
        if point.collections is None or self._collections is None:
            self._collections = point.collections
        elif point.collections > self._collections:
            self.rounds = (self.rounds or 0) + point.collections - self._collections
            self._collections = point.collections
