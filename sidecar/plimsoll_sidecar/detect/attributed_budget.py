"""One leak budget with what attributes its growth: declared caches, and what came with it."""

from __future__ import annotations

import math
from collections import deque

from plimsoll_api.assessment import Segment, SlowGrowth, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.trace import LedgerLine, Sample
from plimsoll_sidecar.detect.attribution import ledger
from plimsoll_sidecar.detect.attribution.trigger import TriggerWatch, sentence
from plimsoll_sidecar.detect.leak.leak_budget import LeakBudgetWatch
from plimsoll_sidecar.detect.leak.slow_leak import SlowLeakWatch, SlowState, limit_of, slow_growth
from plimsoll_sidecar.detect.leak.trend import Point
from plimsoll_sidecar.detect.stalls.stall import work

LOAD_MEMORY_S = 30.0
"""A failed scrape leaves load and ledger as they were for this long; then they are unknown."""
PAGES_S = 30.0
"""A page shows one moment of a load that changes within milliseconds, between no request and all:
what the engine serves is the most that the pages of this time show."""


class LastScrape:
    """``load`` is requests in flight and ``requests`` those ever answered; None is unknown."""

    def __init__(self) -> None:
        self.ledger: list[LedgerLine] = []
        self.load: int | None = None
        self.ready: bool | None = None
        self.requests: int | None = None
        self._known_at = -math.inf
        self._loads: deque[tuple[float, int]] = deque()

    def update(self, sample: Sample) -> None:
        """Take in a sample; what a failed scrape leaves is forgotten when it is too old."""
        if sample.scrape_ok:
            self._known_at, self.ready = sample.t, sample.ready
            self.load, self.requests = self._load(sample), sample.load.requests_total
            if sample.ledger is not None:
                self.ledger = sample.ledger
        elif sample.t - self._known_at > LOAD_MEMORY_S:
            self.load = None

    def _load(self, sample: Sample) -> int | None:
        load = work(sample.load)
        if load is None or sample.load_age_s is None:
            return load
        while self._loads and sample.t - self._loads[0][0] > PAGES_S:
            self._loads.popleft()
        while self._loads and self._loads[-1][1] <= load:
            self._loads.pop()
        self._loads.append((sample.t, load))
        return self._loads[0][1]


SHARED_DEVICE = "other pods use the device, so only the engine's own allocator counts"


class AttributedBudget:
    """Growth of host or device memory in one epoch, which ``kind`` says."""

    def __init__(self, kind: IncidentKind, policy: MemoryPolicy, interval_s: float) -> None:
        on_host = kind is IncidentKind.HOST_GROWTH
        budget = policy.host if on_host else policy.device
        self.memory = "host" if on_host else "device"
        self.watch = LeakBudgetWatch(kind, budget, policy.warmup_s, interval_s)
        self._triggers, self._account = TriggerWatch(), ledger.Account(self.memory)
        self._shared = policy.shared_device and not on_host
        self._slow = SlowLeakWatch()
        self._limit: int | None = None
        self._said: SlowGrowth | None = None

    @property
    def bases(self) -> list[Point]:
        """Where growth is measured from; empty before the warm-up has ended."""
        return self.watch.baseline.bases if self.watch.baseline else []

    @property
    def owners(self) -> dict[str, ledger.Owner] | None:
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
        owners: dict[str, ledger.Owner] | None,
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
        self.watch.update(point, sizes, scrape.ready, in_long_step)
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
        suspicion.evidence += ledger.out_of_bounds(declared, self.memory)
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
        if floor is None or watch.baseline.settling():
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
