"""One leak budget, host or device: what is consumed, how fast, and whether that is suspicious.

The budget is allowed within its window, so growth is measured against the least growth within that
window; against the memory limit it is measured from the baseline on. The worse of the two counts.

:class:`AttributedBudget` adds what explains its growth: declared caches, and what came with it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from plimsoll_api.assessment import BudgetState, Segment, SlowGrowth, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import LedgerLine, Sample
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.attribution import (
    Account,
    Owner,
    TriggerWatch,
    out_of_bounds,
    sentence,
)
from plimsoll_sidecar.detect.baseline import Baseline, NewDemand, Warmup
from plimsoll_sidecar.detect.growth import (
    Growth,
    LatestGrowth,
    Point,
    SegmentDelta,
    SlidingMinimum,
    Trend,
    grown_most,
)
from plimsoll_sidecar.detect.odds import Hysteresis, Standing, odds, unconfirmed
from plimsoll_sidecar.detect.segments import LastScrape
from plimsoll_sidecar.detect.slow_leak import SlowLeakWatch, SlowState, limit_of, slow_growth
from plimsoll_sidecar.detect.thresholds import THRESHOLDS

MIN_RISE_BYTES = 2 << 20
SMOOTH_S = 60.0
"""Growth is averaged over this time, for a low floor alone is noise. A later detector is warm after
it."""
NEW_DEMAND = (
    "may be what more requests or longer prompts than ever before need, unless the growth continues"
)
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
        self._latest = LatestGrowth(interval_s)
        self._window = SlidingMinimum(budget.window_s if budget else 0.0)
        self._smooth, self._smoothed_at = 0.0, 0.0
        self._suspected: Hysteresis | None = None
        self._proven_at = -math.inf
        self._in_long_step = False
        self._new_demand: NewDemand | None = None
        self._explained = 0

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
        demand_is_new: bool = False,
    ) -> None:
        """Take in a sample. ``ready`` is None where the engine does not say whether it is."""
        self._in_long_step = in_long_step
        self._latest.add(point)
        self._first_requests(point)
        if self.baseline is None:
            self.state = BudgetState(current=point.bytes)
            if self._warm_up(point, sizes, ready):
                self._become_warm(point)
            return
        self._recent.append(point)
        while point.t - self._recent[0].t > FLOOR_S:
            self._recent.popleft()
        floor = min(self._recent, key=lambda p: p.bytes)
        if demand_is_new and self.baseline.measured and (self.waits or not self._believed()):
            self._wait(point, floor)
            return
        if self._new_demand is not None:
            self._explained += self._new_demand.end(self.baseline, floor)
            self._new_demand = None
        if self.baseline.settling():
            self._latest.forget()
        else:
            self._feed(point, sizes)
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
    def waits(self) -> bool:
        """Whether nothing is judged, because the demand is new."""
        return self._new_demand is not None

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
            growing=self._latest.keeps(trend),
            unconfirmed=NEW_DEMAND if self.waits else unconfirmed(now, likely),
            evidence=[
                f"{format_bytes(trend.rise)} in {trend.span_s:.0f} s at comparable load, "
                f"{format_bytes(trend.bytes_per_s * 3600)} an hour",
                f"the chance of a leak is {likely.chance:.1%}; otherwise it is most likely "
                f"{otherwise} ({chance:.1%})",
            ],
        )

    def _believed(self) -> bool:
        """Whether the odds of a leak suffice: it does not begin with the demand of this moment."""
        now = self.standing()
        return now is not None and unconfirmed(now, odds(now.look())) is None

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
            self.baseline, self._explained = None, 0
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

    def _wait(self, point: Point, floor: Point) -> None:
        """Judge nothing: what grows now may be what the new demand needs."""
        if self._new_demand is None:
            trend = self._series.trend()
            self._new_demand = NewDemand(floor, trend.bytes_per_s if trend is not None else 0.0)
        self._new_demand.add(floor)
        self._latest.forget()
        self.state.current = floor.bytes
        if self._suspected is not None:
            self._suspected.wait(point)

    def _feed(self, point: Point, sizes: dict[Segment, int]) -> None:
        self._series.add(replace(point, bytes=point.bytes - self._explained))
        for segment, size in sizes.items():
            delta = self._segments.get(segment)
            if delta is None:
                delta = self._segments[segment] = SegmentDelta(self._interval_s)
            delta.add(Point(point.t, size, point.declared))

    def _become_warm(self, point: Point) -> None:
        warmup = self._warmup
        floor = warmup.floor or point
        settled = None if warmup.climbing else warmup.settled_load(point)
        self.baseline, self._new_demand = Baseline(floor, settled), None
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


SHARED_DEVICE = "other pods use the device, so only the engine's own allocator counts"


class AttributedBudget:
    """Growth of host or device memory in one epoch, which ``kind`` says."""

    def __init__(self, kind: IncidentKind, policy: MemoryPolicy, interval_s: float) -> None:
        on_host = kind is IncidentKind.HOST_GROWTH
        budget = policy.host if on_host else policy.device
        self.memory = "host" if on_host else "device"
        self.watch = LeakBudgetWatch(kind, budget, policy.warmup_s, interval_s)
        self._triggers, self._account = TriggerWatch(), Account(self.memory)
        self._shared = policy.shared_device and not on_host
        self._slow = SlowLeakWatch()
        self._limit: int | None = None
        self._said: SlowGrowth | None = None

    @property
    def bases(self) -> list[Point]:
        """Where growth is measured from; empty before the warm-up has ended."""
        return self.watch.baseline.bases if self.watch.baseline else []

    @property
    def owners(self) -> dict[str, Owner] | None:
        """What the engine's caches account for; None before the warm-up has ended."""
        return dict(self._account.owners) if self.watch.baseline is not None else None

    @property
    def slow_state(self) -> SlowState:
        """The hours in which slow growth is looked for."""
        return self._slow.state

    @property
    def slow(self) -> SlowGrowth | None:
        """Whether the memory grows slowly; None before it was watched for long enough."""
        return self._said

    def resume(
        self,
        bases: list[Point],
        owners: dict[str, Owner] | None,
        slow: SlowState,
        t: float,
    ) -> None:
        """Go on from what an earlier detector found in the same epoch."""
        if bases and self.watch.baseline is None:
            self._account.resume(owners)
            self._slow.resume(slow, t, self._limit)
            self._tell_slow()
        self.watch.resume(bases, t)

    def take(
        self,
        sample: Sample,
        total: int,
        sizes: dict[Segment, int],
        scrape: LastScrape,
        in_long_step: bool,
    ) -> None:
        """Take in a sample's ``total`` bytes and the sizes of its segments."""
        point = self._point(sample, total, scrape)
        self.watch.update(point, sizes, scrape.ready, in_long_step, scrape.demand_is_new)
        self._tell_since(point)
        self._take_slow(sample)
        if self.watch.budget is not None and sample.scrape_ok:
            undeclared = point.bytes - point.declared
            self._triggers.add(point.t, undeclared, point.load, sample.load)

    def suspicion(self, t: float, declared: list[LedgerLine]) -> Suspicion | None:
        """Return what is suspected at ``t``, with the ledger's evidence and what came with it."""
        suspicion = self.watch.suspicion()
        if suspicion is None:
            return None
        suspicion.evidence += out_of_bounds(declared, self.memory)
        if not declared:
            suspicion.evidence.append(
                "the engine declares no caches, so a cache that still fills may be included: "
                "with the probe or a ledger, this would be decided sooner"
            )
        if self._shared:
            suspicion.evidence.append(SHARED_DEVICE)
        since = self.watch.suspected_since
        if since is not None:
            suspicion.trigger = self._triggers.over(since, t)
        found = sentence(suspicion.trigger) if suspicion.trigger is not None else None
        if found is not None:
            suspicion.evidence.append(found)
        return suspicion

    def _tell_since(self, point: Point) -> None:
        """Say what the engine has met since the warm-up, for a comparison with other replicas."""
        if not self.bases:
            return
        base, state = self.bases[0], self.watch.state
        state.age_s = max(0.0, point.t - base.t)
        if point.requests is not None and base.requests is not None:
            answered = point.requests - base.requests
            state.requests = answered if answered >= 0 else None

    def _take_slow(self, sample: Sample) -> None:
        watch = self.watch
        self._limit = limit_of(self.memory, watch.budget, sample, self._shared)
        watch.state.limit = self._limit
        if watch.baseline is None:  # the warm-up, which may begin again with the first requests
            if self._slow.begun:
                self._slow, self._said = SlowLeakWatch(), None
            return
        floor = watch.state.current
        if floor is None or watch.waits or watch.baseline.settling():
            return
        if self._slow.add(sample.t, watch.baseline.growth, floor, self._limit):
            self._tell_slow()

    def _tell_slow(self) -> None:
        """Say what the newest hour showed; until the next one it stays as it is."""
        slow = self._slow
        if slow.known:
            segment = self.watch.grown_segment
            self._said = slow_growth(slow.found, slow.peak, self._limit, segment, self._why())

    def _why(self) -> str:
        """Say why there is no limit."""
        if self._shared:
            return "other pods use the device, so its free memory is not only the engine's"
        if self.memory == "device":
            return "the size of the device is unknown"
        return "no memory limit is known: set spec.memory.host.limit or the engine's limit"

    def _point(self, sample: Sample, size: int, scrape: LastScrape) -> Point:
        def point(declared: int) -> Point:
            return Point(sample.t, size, declared, scrape.load, scrape.requests)

        watch = self.watch
        return point(self._account.declared(scrape.ledger, lambda known: watch.grown(point(known))))
