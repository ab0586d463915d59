"""The detector: one sample in, everything that is suspected now out. Pure: no clock, no I/O.

State belongs to one epoch and stays bounded however long that lasts.
"""

from __future__ import annotations

import math
from collections import deque

from plimsoll_api.admin import Parts
from plimsoll_api.assessment import Assessment, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import MemoryPolicy
from plimsoll_api.trace import LedgerLine, OpenFiles, Sample
from plimsoll_sidecar.detect.attribution import ledger, segments
from plimsoll_sidecar.detect.attribution.roles import Roles
from plimsoll_sidecar.detect.attribution.trigger import TriggerWatch, sentence
from plimsoll_sidecar.detect.leak.baseline import Checkpoint
from plimsoll_sidecar.detect.leak.leak_budget import LeakBudgetWatch
from plimsoll_sidecar.detect.leak.trend import Point
from plimsoll_sidecar.detect.losses.capacity_loss import CapacityWatch
from plimsoll_sidecar.detect.losses.left_behind import LeftBehindWatch
from plimsoll_sidecar.detect.losses.oom_kill import OomKillWatch
from plimsoll_sidecar.detect.losses.open_files import with_open_files
from plimsoll_sidecar.detect.losses.orphaned_device import OrphanWatch
from plimsoll_sidecar.detect.stalls.stall import StallWatch, work

LOAD_MEMORY_S = 30.0
"""A failed scrape leaves load and ledger as they were for this long; then they are unknown."""
PAGES_S = 30.0
"""A page shows one moment of a load that changes within milliseconds, between no request and all:
what the engine serves is the most that the pages of this time show."""
OBSERVED_CONFIDENCE = 0.8
"""Share of the trend's confidence that stays where an engine keeps no ledger: a cache of its own
that still fills looks like a leak."""
SHARED_DEVICE = "other pods use the device, so only the engine's own allocator counts"
UNUSED = Segment.TORCH_RESERVED_UNUSED
OURS = ("worker", "frontend")
"""Processes as our own engine calls them."""
SOURCE_PATIENCE = 30
"""Samples without the chosen source of host memory before another is chosen (new baseline)."""


class Detector:
    """Judges one engine. ``interval_s`` is the expected time between samples."""

    def __init__(self, memory: MemoryPolicy, stall_timeout_s: float, interval_s: float) -> None:
        self.memory = memory
        self.stall_timeout_s = stall_timeout_s
        self.interval_s = max(0.01, interval_s)
        self._epoch: _Epoch | None = None
        self._last_t = -math.inf
        # Whose memory it is that nobody holds cannot be said of a device that others use.
        orphan = () if memory.shared_device else (OrphanWatch(),)
        self._watches = (OomKillWatch(), LeftBehindWatch(memory.host), *orphan)
        self._losses: list[Suspicion] = []
        self._open_files: OpenFiles | None = None

    def update(self, sample: Sample) -> Assessment:
        """The view after ``sample``. One whose time does not go forward changes nothing."""
        forward = math.isfinite(sample.t) and sample.t > self._last_t
        if self._epoch is None or (forward and self._epoch.number != sample.epoch):
            self._epoch = _Epoch(sample.epoch, self)
        if forward:
            self._last_t = sample.t
            self._epoch.update(sample)
            found = [watch.update(sample) for watch in self._watches]
            self._losses = [suspicion for suspicion in found if suspicion is not None]
            self._open_files = sample.host.open_files
        assessment = self._epoch.assessment(sample.t)
        suspicions = [*assessment.suspicions, *self._losses]
        assessment.suspicions = with_open_files(suspicions, self._open_files)
        return assessment

    def checkpoint(self) -> Checkpoint:
        """What a later detector of the same epoch needs; empty before the warm-up has ended."""
        return self._epoch.checkpoint() if self._epoch else Checkpoint()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from what an earlier detector found in the epoch of the newest sample."""
        if self._epoch is not None:
            self._epoch.resume(checkpoint, self._last_t)


class _Epoch:
    """Everything known about one epoch."""

    def __init__(self, number: int, detector: Detector) -> None:
        memory, interval = detector.memory, detector.interval_s
        self.number = number
        self.memory, self.interval_s = memory, interval
        self.host = LeakBudgetWatch(
            IncidentKind.HOST_GROWTH, memory.host, memory.warmup_s, interval
        )
        self.device = self._device_watch()
        self.in_use = self._device_watch()
        self.triggers: dict[LeakBudgetWatch, TriggerWatch] = {}
        self.accounts: dict[LeakBudgetWatch, ledger.Account] = {}
        self._follow(self.host, "host")
        self._follow(self.device, "device")
        self._follow(self.in_use, "device")
        self.stall = StallWatch(detector.stall_timeout_s, interval)
        self.stalled: Suspicion | None = None
        self.capacity = CapacityWatch()
        self.lost: Suspicion | None = None
        self.parts: Parts | None = None
        self.sizes: dict[Segment, int] = {}
        self.ledger: list[LedgerLine] = []
        self.load: int | None = None
        self.ready: bool | None = None
        self.requests: int | None = None
        self._known_at = -math.inf
        self._loads: deque[tuple[float, int]] = deque()
        self._source: segments.HostSource | None = None
        self._missing = 0
        self._device_seen = self._accounted = False
        self._in_use_missing: int | None = None
        self._roles = Roles(lambda process: process.anonymous)
        self._shared_roles = Roles(lambda process: process.rss_shmem)

    def update(self, sample: Sample) -> None:
        self._recall(sample)
        self.parts = sample.parts or self.parts
        self.stalled = self.stall.update(sample)
        self.lost = self.capacity.update(sample)
        self._take_host(sample)
        self._take_device(sample)

    def assessment(self, t: float) -> Assessment:
        watches = [self.host] if self._source is not None else []
        # Growth of what is in use explains the growth of what its allocator reserves.
        on_device = [self.in_use] if self._in_use_missing is not None else []
        on_device += [self.device] if self._device_seen else []
        suspicions = [s for s in (self._growth(watch, t) for watch in watches) if s is not None]
        found = (self._growth(watch, t) for watch in on_device)
        suspicions += [s for s in found if s is not None][:1]
        watches += on_device
        suspicions += [one for one in (self.stalled, self.lost) if one is not None]
        for one in suspicions:
            one.process = self._called(one)
        return Assessment(
            t=t,
            epoch=self.number,
            warm=bool(watches) and all(watch.warm(t) for watch in watches),
            segments=dict(self.sizes),
            host=self.host.state if self._source is not None else None,
            device=on_device[0].state if on_device else None,
            reserved=on_device[1].state if len(on_device) > 1 else None,
            suspicions=suspicions,
            in_long_step=self.stall.in_long_step,
        )

    def checkpoint(self) -> Checkpoint:
        host, device, in_use = self.host.baseline, self.device.baseline, self.in_use.baseline
        return Checkpoint(
            host=host.bases if host else [],
            device=device.bases if device else [],
            in_use=in_use.bases if in_use else [],
            host_owners=self._owners(self.host),
            device_owners=self._owners(self.device),
            in_use_owners=self._owners(self.in_use),
            roles=self._roles.bases if host else {},
            shared_roles=self._shared_roles.bases if host else {},
        )

    def _owners(self, watch: LeakBudgetWatch) -> dict[str, ledger.Owner] | None:
        return dict(self.accounts[watch].owners) if watch.baseline is not None else None

    def resume(self, checkpoint: Checkpoint, t: float) -> None:
        for watch, bases, owners in (
            (self.host, checkpoint.host, checkpoint.host_owners),
            (self.device, checkpoint.device, checkpoint.device_owners),
            (self.in_use, checkpoint.in_use, checkpoint.in_use_owners),
        ):
            if bases and watch.baseline is None:
                self.accounts[watch].resume(owners)
            watch.resume(bases, t)
        self._roles.resume(checkpoint.roles)
        self._shared_roles.resume(checkpoint.shared_roles)

    # ---- one sample

    def _recall(self, sample: Sample) -> None:
        """Load and ledger of the last good scrape, forgotten when that is long ago."""
        if sample.scrape_ok:
            self._known_at, self.ready = sample.t, sample.ready
            self.load, self.requests = self._load(sample), sample.load.requests_total
            if sample.ledger is not None:
                self.ledger = sample.ledger
        elif sample.t - self._known_at > LOAD_MEMORY_S:
            self.load = None

    def _load(self, sample: Sample) -> int | None:
        """Requests in flight; null is unknown."""
        load = work(sample.load)
        if load is None or sample.load_age_s is None:
            return load
        while self._loads and sample.t - self._loads[0][0] > PAGES_S:
            self._loads.popleft()
        while self._loads and self._loads[-1][1] <= load:
            self._loads.pop()
        self._loads.append((sample.t, load))
        return self._loads[0][1]

    def _take_host(self, sample: Sample) -> None:
        if self._source is None or self._missing >= SOURCE_PATIENCE:
            self._choose_source(sample)
        total = self._source.total(sample.host) if self._source else None
        if total is None or self._source is None:
            self._missing += 1
            return
        self._missing = 0
        self._accounted = self._accounted or sample.malloc is not None
        sizes = segments.host_segments(sample, self._source, self._accounted)
        self.sizes.update(sizes)
        for roles in (self._roles, self._shared_roles):
            roles.update(sample.host.by_process or [], self.host.baseline is not None)
        self._take(self.host, sample, self._point(self.host, sample, total), sizes)

    def _choose_source(self, sample: Sample) -> None:
        source = segments.HostSource.best(sample.host)
        if source is not None and source != self._source and self._source is not None:
            memory = self.memory
            del self.triggers[self.host], self.accounts[self.host]
            self.host = LeakBudgetWatch(
                IncidentKind.HOST_GROWTH, memory.host, memory.warmup_s, self.interval_s
            )
            self._follow(self.host, "host")
        self._source = source or self._source

    def _take_device(self, sample: Sample) -> None:
        shared = self.memory.shared_device
        total = segments.device_own(sample) if shared else segments.device_total(sample)
        if total is None:
            return
        self._device_seen = True
        sizes = segments.device_segments(sample)
        if shared:
            sizes.pop(Segment.NON_TORCH, None)
        self.sizes.update(sizes)
        self._take(self.device, sample, self._point(self.device, sample, total), sizes)
        self._take_in_use(sample, total, sizes)

    def _take_in_use(self, sample: Sample, total: int, sizes: dict[Segment, int]) -> None:
        """What the engine holds on its devices without what its allocator keeps for later: a leak
        that fills such room shows here long before the device has less to give."""
        unused = segments.device_unused(sample)
        if unused is not None and unused <= total:
            self._in_use_missing = 0
            held = {name: size for name, size in sizes.items() if name is not UNUSED}
            self._take(self.in_use, sample, self._point(self.in_use, sample, total - unused), held)
        elif self._in_use_missing is not None:
            self._in_use_missing += 1
            if self._in_use_missing > SOURCE_PATIENCE:
                del self.triggers[self.in_use], self.accounts[self.in_use]
                self.in_use, self._in_use_missing = self._device_watch(), None
                self._follow(self.in_use, "device")

    def _follow(self, watch: LeakBudgetWatch, kind: str) -> None:
        self.triggers[watch], self.accounts[watch] = TriggerWatch(), ledger.Account(kind)

    def _device_watch(self) -> LeakBudgetWatch:
        memory = self.memory
        return LeakBudgetWatch(
            IncidentKind.DEVICE_GROWTH, memory.device, memory.warmup_s, self.interval_s
        )

    def _take(
        self, watch: LeakBudgetWatch, sample: Sample, point: Point, sizes: dict[Segment, int]
    ) -> None:
        watch.update(point, sizes, self.ready, self.stall.in_long_step)
        if watch.budget is not None and sample.scrape_ok:
            undeclared = point.bytes - point.declared
            self.triggers[watch].add(point.t, undeclared, point.load, sample.load)

    def _point(self, watch: LeakBudgetWatch, sample: Sample, size: int) -> Point:
        collections = sample.malloc.full_collections if sample.malloc else None

        def point(declared: int) -> Point:
            return Point(sample.t, size, declared, self.load, self.requests, collections)

        account = self.accounts[watch]
        return point(account.declared(self.ledger, lambda known: watch.grown(point(known))))

    # ---- attribution

    def _growth(self, watch: LeakBudgetWatch, t: float) -> Suspicion | None:
        suspicion = watch.suspicion()
        if suspicion is None:
            return None
        kind = "host" if watch is self.host else "device"
        suspicion.evidence += ledger.out_of_bounds(self.ledger, kind)
        if not self.ledger:
            suspicion.confidence = round(suspicion.confidence * OBSERVED_CONFIDENCE, 3)
            suspicion.evidence.append(
                "the engine declares no caches, so a cache that still fills may be included"
            )
        if kind == "device" and self.memory.shared_device:
            suspicion.evidence.append(SHARED_DEVICE)
        since = watch.suspected_since
        if since is not None:
            suspicion.trigger = self.triggers[watch].over(since, t)
        found = sentence(suspicion.trigger) if suspicion.trigger is not None else None
        if found is not None:
            suspicion.evidence.append(found)
        suspicion.process = "worker" if kind == "device" else self._grown_role(suspicion.segment)
        return suspicion

    def _called(self, suspicion: Suspicion) -> str | None:
        """The process as the engine calls it. An engine that is not ours has no worker: there it
        is the process that makes the steps, or that runs the model; None where nobody knows it."""
        parts = self.parts
        if parts is None or suspicion.process not in OURS:
            return suspicion.process
        if suspicion.process == "frontend":
            return parts.serves or suspicion.process
        return parts.steps if suspicion.kind is IncidentKind.STALL else parts.runs

    def _grown_role(self, segment: Segment | None) -> str | None:
        if segment is Segment.SHARED_ORPHAN:
            return None  # whoever made it has ended
        if segment is Segment.SHARED and self._shared_roles.known:
            return self._shared_roles.sole()
        return self._roles.largest()
