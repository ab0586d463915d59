"""Measure how much of a leak budget is consumed and how fast, and suspect leaks.

The growth above the window's minimum is a share of the budget. The growth above the baseline is a
share of the room between the baseline and the memory limit. The larger share counts. While demand
is higher than ever before in the epoch, growth is judged only if a leak was already confirmed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from plimsoll_api.assessment import BudgetState, Segment, SlowGrowth, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.trace import LedgerLine, Sample
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.attribution import (
    LedgerAccount,
    Owner,
    TriggerFinder,
    describe_exceeded_bounds,
    describe_trigger,
)
from plimsoll_sidecar.detect.baseline import Baseline, Warmup
from plimsoll_sidecar.detect.demand import NewDemand
from plimsoll_sidecar.detect.growth import (
    FLOOR_WINDOW_S,
    MIN_LATEST_TO_TREND_PACE,
    GrowthHistory,
    Point,
    SegmentGrowth,
    SlidingMinimum,
    Trend,
    Trends,
)
from plimsoll_sidecar.detect.odds import Evidence, SuspectedGrowth, compute_odds, is_confirmed
from plimsoll_sidecar.detect.segments import LastScrape
from plimsoll_sidecar.detect.slow_leak import SlowLeakWatch, SlowState, find_memory_limit
from plimsoll_sidecar.detect.thresholds import THRESHOLDS

MIN_RISE_BYTES = 2 << 20
MAX_RECENT_POINTS = 64
RESUMED_WARMUP_S = 60.0
"""Time after which a resumed detector counts as warm. A trend needs this time to show again."""
NEW_DEMAND_MESSAGE = (
    "demand is higher than ever before and may explain the growth, unless the growth continues"
)
NO_LEDGER_MESSAGE = (
    "the engine declares no caches, so the growth may include a cache that still fills: "
    "with vLLM and SGLang, install Plimsoll's probe for an earlier decision"
)
SHARED_DEVICE_MESSAGE = (
    "other pods use the device, so only the memory of the engine's own allocator counts"
)


MIN_EXPLAINED_SHARE = 0.1
"""Share of the growth. If the ledger, which names no processes, explains more, the trigger is
sought for the whole engine."""


class MemoryWatch:
    """Watch of host or device memory in one epoch; without a budget, nothing is suspected.

    ``slow`` is the slow growth; None until memory has been watched for long enough.
    """

    def __init__(self, kind: IncidentKind, policy: MemoryPolicy, interval_s: float) -> None:
        on_host = kind is IncidentKind.HOST_GROWTH
        self.kind = kind
        self.memory = "host" if on_host else "device"
        self.budget = policy.host if on_host else policy.device
        self.state = BudgetState()
        self.baseline: Baseline | None = None
        self.slow: SlowGrowth | None = None
        self._shared = policy.shared_device and not on_host
        self._warmup_s, self._interval_s = policy.warmup_s, interval_s
        self._warmup = self._create_warmup()
        self._trends = self._create_trends()
        self._segments = SegmentGrowth()
        self._recent: deque[Point] = deque(maxlen=MAX_RECENT_POINTS)
        self._course = GrowthHistory(interval_s)
        self._window = SlidingMinimum(self.budget.window_s if self.budget else 0.0)
        self._t = 0.0
        self._suspected: SuspectedGrowth | None = None
        self._conclusive_at = -math.inf
        self._new_demand: NewDemand | None = None
        self._explained = 0
        self._triggers, self._account = TriggerFinder(), LedgerAccount(self.memory)
        self._slow_leak = SlowLeakWatch()

    # ---- the state that a later detector of the same epoch needs

    @property
    def bases(self) -> list[Point]:
        """Bases of all classes of load; empty until the warm-up has ended."""
        return self.baseline.bases if self.baseline else []

    @property
    def owners(self) -> dict[str, Owner]:
        """Owners of declared memory; empty until the warm-up has ended."""
        return dict(self._account.owners) if self.baseline is not None else {}

    @property
    def slow_state(self) -> SlowState:
        """State of the search for slow growth."""
        return self._slow_leak.state

    def resume(
        self, bases: list[Point], owners: dict[str, Owner], slow: SlowState, t: float
    ) -> None:
        """Continue from an earlier detector; warm only after :data:`RESUMED_WARMUP_S`."""
        if not bases or self.baseline is not None:
            return
        self._account.resume(owners)
        self._slow_leak.resume(slow, t, self.state.limit)
        self._update_slow()
        self.baseline = Baseline.restore(bases)
        self._warmup.served = True
        self._window.start(t)
        self._course = GrowthHistory(self._interval_s)
        self._t, self._conclusive_at = t, t + RESUMED_WARMUP_S

    # ---- one sample

    def update(
        self, sample: Sample, total: int, sizes: dict[Segment, int], scrape: LastScrape
    ) -> None:
        """Add a sample of ``total`` bytes, and the sizes of its segments."""
        point = Point(sample.t, total, 0, scrape.load, scrape.requests)
        measure_growth = (self.baseline or self._warmup).measure_growth
        declared = self._account.explain(
            scrape.ledger, lambda known: measure_growth(replace(point, declared=known))
        )
        point = replace(point, declared=declared)
        self._restart_warmup(point)
        if self.baseline is None:
            self.state = BudgetState(current=total)
            if self._warm_up(point, sizes, scrape.ready):
                self._end_warmup(point)
        else:
            self._judge_growth(point, sizes, self.baseline, scrape.demand_is_new)
        self._add_report(sample, point)
        if self.budget is not None and sample.scrape_ok:
            self._triggers.add(point.t, total - declared, sample.load)

    def _create_warmup(self) -> Warmup:
        budget = self.budget.growth_bytes if self.budget else None
        return Warmup(self._warmup_s, budget, self._interval_s)

    def _create_trends(self) -> Trends:
        early = THRESHOLDS.early_share * (self.budget.growth_bytes if self.budget else 0)
        return Trends(self._interval_s, max(MIN_RISE_BYTES, early / 2))

    def _restart_warmup(self, point: Point) -> None:
        """Restart the warm-up at the first request, because it fills caches and arenas."""
        first = self.baseline is not None and not self._warmup.served and bool(point.requests)
        if first and self._suspected is None:
            self.baseline, self._explained = None, 0
            self._warmup, self._slow_leak = self._create_warmup(), SlowLeakWatch()
            self.slow = None

    def _warm_up(self, point: Point, sizes: dict[Segment, int], ready: bool | None) -> bool:
        if ready is False:
            self._warmup = self._create_warmup()
        warmup = self._warmup
        in_least_time = warmup.floor is None
        ended = ready is not False and warmup.add(point, ready)
        settled = in_least_time and warmup.floor is not None and not warmup.climbing
        if not warmup.has_started or settled:
            # Growth before the end of the minimum time is no evidence of growth after it.
            self._trends = self._create_trends()
            self._segments = SegmentGrowth()
            self._course = GrowthHistory(self._interval_s)
        if warmup.has_started:
            self._add_to_trends(point, sizes)
            self._course.add(point.t, warmup.measure_growth(point), point.requests)
        return ended

    def _end_warmup(self, point: Point) -> None:
        warmup = self._warmup
        floor = warmup.floor or point
        self.baseline, self._new_demand = Baseline(floor), None
        self._window.start(floor.t)
        if warmup.climbing:
            self._course.subtract_growth(warmup.measure_growth(floor))
        else:
            # The climb of the warm-up is no evidence of growth after it.
            self._trends.clear()
            self._segments = SegmentGrowth()
            self._course = GrowthHistory(self._interval_s)

    def _judge_growth(
        self, point: Point, sizes: dict[Segment, int], baseline: Baseline, demand_is_new: bool
    ) -> None:
        self._recent.append(point)
        while point.t - self._recent[0].t > FLOOR_WINDOW_S:
            self._recent.popleft()
        floor = min(self._recent, key=lambda p: p.bytes)
        if (
            demand_is_new
            and baseline.measured
            and (self._new_demand is not None or not self._is_confirmed())
        ):
            self._defer_judgment(floor)
            return
        if self._new_demand is not None:
            self._explained += self._new_demand.finish(baseline, floor)
            self._new_demand = None
        if not baseline.is_settling():
            self._add_to_trends(point, sizes)
        baseline.update(floor)
        if baseline.known:
            self._window.add(point.t, baseline.growth)
            self._course.add(point.t, baseline.growth, point.requests)
        self._t = point.t
        self._update_state(point, floor, baseline)

    def _defer_judgment(self, floor: Point) -> None:
        if self._new_demand is None:
            trend = self._trends.find_steepest()
            self._new_demand = NewDemand(floor, trend.bytes_per_s if trend is not None else 0.0)
        self._new_demand.add(floor)
        self.state.current = floor.bytes

    def _add_to_trends(self, point: Point, sizes: dict[Segment, int]) -> None:
        self._trends.add(replace(point, bytes=point.bytes - self._explained))
        self._segments.add(sizes, point.declared)

    def _update_state(self, point: Point, floor: Point, baseline: Baseline) -> None:
        growth, trend, at = baseline.growth, self._trends.find_steepest(), THRESHOLDS
        self.state = BudgetState(
            current=floor.bytes,
            baseline=baseline.base,
            explained=baseline.explained,
            unexplained=max(0, growth),
            bytes_per_s=trend.bytes_per_s if trend else None,
        )
        if self.budget is None:
            return
        low = self._window.find_minimum()
        consumed = max(0, growth - low)
        left = self.budget.growth_bytes - consumed
        ratio = consumed / self.budget.growth_bytes
        limit = self.budget.limit_bytes
        if limit is not None:
            headroom = max(1, limit - baseline.base)
            ratio = max(ratio, max(0, growth) / headroom)
            left = min(left, limit - floor.bytes)
        self.state.consumed_ratio = ratio
        part = at.suspect_share / 2 * self.budget.growth_bytes
        pace = self._course.measure_pace(low, part) if trend is not None else None
        if trend is not None and pace is not None:
            # The steepest of several trends is often too steep, and the pace of noise is high.
            left_s = max(0.0, left / max(1.0, min(pace, trend.bytes_per_s)))
            self.state.exhaustion_s = left_s
            early_s = self.budget.window_s if trend.span_s >= at.slow_s else at.soon_s
            share = at.early_share if left_s <= early_s else at.suspect_share
            # Half of the share must come from the trend itself.
            large = self._trends.find_steepest(share / 2 * self.budget.growth_bytes)
            trend = large if ratio >= share else None
        else:
            trend = None
        if self._suspected is not None:
            if not self._suspected.update(point, trend, growth):
                self._suspected = None
        elif trend is not None:
            self._suspected = SuspectedGrowth(trend, point, growth)

    def _add_report(self, sample: Sample, point: Point) -> None:
        if self.bases:
            base = self.bases[0]
            self.state.age_s = max(0.0, point.t - base.t)
            if point.requests is not None and base.requests is not None:
                completed = point.requests - base.requests
                self.state.requests = completed if completed >= 0 else None
        limit = find_memory_limit(self.memory, self.budget, sample, self._shared)
        self.state.limit = limit
        floor = self.state.current
        if floor is None or self._new_demand is not None:
            return
        if self.baseline is None or self.baseline.is_settling():
            return
        if self._slow_leak.add(sample.t, self.baseline.growth, floor, limit):
            self._update_slow()

    def _update_slow(self) -> None:
        segment = self._segments.find_largest()
        self.slow = self._slow_leak.make_report(self.state.limit, segment)

    # ---- the verdict

    def is_warm(self, t: float) -> bool:
        """Report whether memory has been watched for long enough to rule out a leak."""
        suspected = self._suspected is not None
        return self.baseline is not None and (suspected or t >= self._conclusive_at)

    @property
    def suspected_since(self) -> float | None:
        """Time at which the suspected growth started; None if no growth is suspected."""
        return self._suspected.since if self._suspected is not None else None

    def make_evidence(self) -> Evidence | None:
        """Return the observations of the suspected growth; None if no growth is suspected."""
        if self._suspected is None or self.budget is None or self.baseline is None:
            return None
        trend = self._suspected.trend
        return Evidence(
            share=self.state.consumed_ratio or 0.0,
            left_s=self.state.exhaustion_s,
            window_s=self.budget.window_s,
            life=self._course.measure_age() / max(1.0, self._t - self.baseline.since),
            fading=trend.fading,
            climb=trend.climb,
            segment=self._segments.find_largest(),
        )

    def make_suspicion(
        self,
        t: float,
        declared: list[LedgerLine],
        get_trigger_finder: Callable[[Segment | None], TriggerFinder | None] = lambda _: None,
    ) -> Suspicion | None:
        """Return the suspicion at ``t`` with all evidence; None if no growth is suspected.

        ``get_trigger_finder`` returns the trigger finder of the process in which a segment grew.
        """
        evidence = self.make_evidence()
        if evidence is None or self._suspected is None or self.budget is None:
            return None
        trend, posterior = self._suspected.trend, compute_odds(evidence)
        explanation, probability = posterior.likeliest_alternative
        growth = self.state.unexplained or 0
        certain = 1 - THRESHOLDS.noise * trend.noise / max(1, growth)
        unconfirmed = None
        if self._new_demand is not None:
            unconfirmed = NEW_DEMAND_MESSAGE
        elif not (
            is_confirmed(evidence, posterior)
            and self._course.is_sustained(self.budget.growth_bytes)
        ):
            unconfirmed = f"may be {explanation}, unless the growth continues"
            if evidence.share >= 1.0:
                unconfirmed = f"the budget is spent, but the growth {unconfirmed}"
        explains = (self.state.explained or 0) > MIN_EXPLAINED_SHARE * growth
        # The ledger names no processes.
        own = None if explains else get_trigger_finder(evidence.segment)
        trigger = (own or self._triggers).find_trigger(self._suspected.since, t)
        hypothesis = describe_trigger(trigger) if trigger is not None else None
        return Suspicion(
            kind=self.kind,
            segment=evidence.segment,
            confidence=round(posterior.probability, 3),
            consumed_ratio=round(evidence.share, 4),
            bytes=growth,
            bytes_per_s=trend.bytes_per_s,
            bytes_per_request=trend.bytes_per_request,
            over_budget=evidence.share * certain >= 1.0,
            growing=self._is_growing(trend),
            unconfirmed=unconfirmed,
            trigger=trigger,
            evidence=[
                f"{format_bytes(trend.rise)} in {trend.span_s:.0f} s at comparable load, "
                f"{format_bytes(trend.bytes_per_s * 3600)} an hour",
                f"probability of a leak: {posterior.probability:.1%}; "
                f"next most likely: {explanation} ({probability:.1%})",
                *describe_exceeded_bounds(declared, self.memory),
                *([] if declared else [NO_LEDGER_MESSAGE]),
                *([SHARED_DEVICE_MESSAGE] if self._shared else []),
                *([hypothesis] if hypothesis is not None else []),
            ],
        )

    def _is_growing(self, trend: Trend) -> bool:
        settling = self.baseline is None or self.baseline.is_settling()
        if settling or self._new_demand is not None:
            return False
        pace = self._course.measure_latest_pace()
        return pace >= MIN_LATEST_TO_TREND_PACE * trend.bytes_per_s

    def _is_confirmed(self) -> bool:
        evidence = self.make_evidence()
        return evidence is not None and is_confirmed(evidence, compute_odds(evidence))
