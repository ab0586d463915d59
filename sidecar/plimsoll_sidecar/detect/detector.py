"""The detector: one sample in, everything that is suspected now out. Pure: no clock, no I/O.

State belongs to one epoch and stays bounded however long that lasts.
"""

from __future__ import annotations

import math

from plimsoll_api.supervision import MemoryPolicy
from plimsoll_sidecar.detect import explain, segments
from plimsoll_sidecar.detect.assessment import Assessment, Kind, Segment, Suspicion
from plimsoll_sidecar.detect.budget import BudgetWatch
from plimsoll_sidecar.detect.capacity import CapacityWatch
from plimsoll_sidecar.detect.killed import KillWatch
from plimsoll_sidecar.detect.orphan import OrphanWatch
from plimsoll_sidecar.detect.remembered import Remembered
from plimsoll_sidecar.detect.roles import Roles
from plimsoll_sidecar.detect.stall import StallWatch, work
from plimsoll_sidecar.detect.trend import Point
from plimsoll_sidecar.detect.trigger import TriggerWatch, sentence
from plimsoll_sidecar.trace import LedgerLine, Sample

LOAD_MEMORY_S = 30.0
"""A failed scrape leaves load and ledger as they were for this long; then they are unknown."""
OBSERVED_CONFIDENCE = 0.8
"""Share of the trend's confidence that stays where an engine keeps no ledger: a cache of its own
that still fills looks like a leak."""
SHARED_DEVICE = "the device is shared with other pods: judged is the engine's own allocator alone"
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
        self._watches = (KillWatch(), *orphan)
        self._told: list[Suspicion] = []

    def update(self, sample: Sample) -> Assessment:
        """The view after ``sample``. One whose time does not go forward changes nothing."""
        forward = math.isfinite(sample.t) and sample.t > self._last_t
        if self._epoch is None or (forward and self._epoch.number != sample.epoch):
            self._epoch = _Epoch(sample.epoch, self)
        if forward:
            self._last_t = sample.t
            self._epoch.update(sample)
            told = [watch.update(sample) for watch in self._watches]
            self._told = [suspicion for suspicion in told if suspicion is not None]
        assessment = self._epoch.assessment(sample.t)
        assessment.suspicions += self._told
        return assessment

    def remembered(self) -> Remembered:
        """What a later detector of the same epoch needs; empty before the warm-up has ended."""
        return self._epoch.remembered() if self._epoch else Remembered()

    def resume(self, remembered: Remembered) -> None:
        """Go on from what an earlier detector found in the epoch of the newest sample."""
        if self._epoch is not None:
            self._epoch.resume(remembered, self._last_t)


class _Epoch:
    """Everything known about one epoch."""

    def __init__(self, number: int, detector: Detector) -> None:
        memory, interval = detector.memory, detector.interval_s
        self.number = number
        self.memory, self.interval_s = memory, interval
        self.host = BudgetWatch(Kind.HOST_GROWTH, memory.host, memory.warmup_s, interval)
        self.device = BudgetWatch(Kind.DEVICE_GROWTH, memory.device, memory.warmup_s, interval)
        self.triggers = {watch.kind: TriggerWatch() for watch in (self.host, self.device)}
        self.stall = StallWatch(detector.stall_timeout_s, interval)
        self.stalled: Suspicion | None = None
        self.capacity = CapacityWatch()
        self.lost: Suspicion | None = None
        self.sizes: dict[Segment, int] = {}
        self.ledger: list[LedgerLine] = []
        self.load: int | None = None
        self.ready: bool | None = None
        self.requests: int | None = None
        self._known_at = -math.inf
        self._source: segments.HostSource | None = None
        self._missing = 0
        self._device_seen = False
        self._roles = Roles(lambda process: process.rss_anon)
        self._shared_roles = Roles(lambda process: process.rss_shmem)

    def update(self, sample: Sample) -> None:
        self._recall(sample)
        self.stalled = self.stall.update(sample)
        self.lost = self.capacity.update(sample)
        self._take_host(sample)
        self._take_device(sample)

    def assessment(self, t: float) -> Assessment:
        host_known, device_known = self._source is not None, self._device_seen
        watches = [w for w, seen in ((self.host, host_known), (self.device, device_known)) if seen]
        suspicions = [s for s in (self._growth(watch, t) for watch in watches) if s is not None]
        suspicions += [one for one in (self.stalled, self.lost) if one is not None]
        return Assessment(
            t=t,
            epoch=self.number,
            warm=bool(watches) and all(watch.warm(t) for watch in watches),
            segments=dict(self.sizes),
            host=self.host.state if host_known else None,
            device=self.device.state if device_known else None,
            suspicions=suspicions,
        )

    def remembered(self) -> Remembered:
        host, device = self.host.baseline, self.device.baseline
        return Remembered(
            host=host.bases if host else [],
            device=device.bases if device else [],
            roles=self._roles.bases if host else {},
            shared_roles=self._shared_roles.bases if host else {},
        )

    def resume(self, remembered: Remembered, t: float) -> None:
        self.host.resume(remembered.host, t)
        self.device.resume(remembered.device, t)
        self._roles.resume(remembered.roles)
        self._shared_roles.resume(remembered.shared_roles)

    # ---- one sample

    def _recall(self, sample: Sample) -> None:
        """Load and ledger of the last good scrape, forgotten when that is long ago."""
        if sample.scrape_ok:
            self._known_at, self.ready = sample.t, sample.ready
            self.load, self.requests = work(sample.load), sample.load.requests_total
            if sample.ledger is not None:
                self.ledger = sample.ledger
        elif sample.t - self._known_at > LOAD_MEMORY_S:
            self.load = None

    def _take_host(self, sample: Sample) -> None:
        if self._source is None or self._missing >= SOURCE_PATIENCE:
            self._choose_source(sample)
        total = self._source.total(sample.host) if self._source else None
        if total is None or self._source is None:
            self._missing += 1
            return
        self._missing = 0
        sizes = segments.host_segments(sample, self._source)
        self.sizes.update(sizes)
        for roles in (self._roles, self._shared_roles):
            roles.update(sample.host.by_process or [], self.host.baseline is not None)
        self._take(self.host, sample, self._point(sample, total, "host"), sizes)

    def _choose_source(self, sample: Sample) -> None:
        source = segments.HostSource.best(sample.host)
        if source is not None and source != self._source and self._source is not None:
            memory = self.memory
            self.host = BudgetWatch(Kind.HOST_GROWTH, memory.host, memory.warmup_s, self.interval_s)
            self.triggers[Kind.HOST_GROWTH] = TriggerWatch()
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
        self._take(self.device, sample, self._point(sample, total, "device"), sizes)

    def _take(
        self, watch: BudgetWatch, sample: Sample, point: Point, sizes: dict[Segment, int]
    ) -> None:
        watch.update(point, sizes, self.ready, self.stall.in_long_step)
        if watch.budget is not None and sample.scrape_ok:
            undeclared = point.bytes - point.declared
            self.triggers[watch.kind].add(point.t, undeclared, point.load, sample.load)

    def _point(self, sample: Sample, size: int, kind: str) -> Point:
        declared = explain.declared(self.ledger, kind)
        collections = sample.malloc.full_collections if sample.malloc else None
        return Point(sample.t, size, declared, self.load, self.requests, collections)

    # ---- attribution

    def _growth(self, watch: BudgetWatch, t: float) -> Suspicion | None:
        suspicion = watch.suspicion()
        if suspicion is None:
            return None
        kind = "host" if watch is self.host else "device"
        suspicion.evidence += explain.out_of_bounds(self.ledger, kind)
        if not self.ledger:
            suspicion.confidence = round(suspicion.confidence * OBSERVED_CONFIDENCE, 3)
            suspicion.evidence.append(
                "observed growth: the engine declares no caches, so that none could be subtracted"
            )
        if kind == "device" and self.memory.shared_device:
            suspicion.evidence.append(SHARED_DEVICE)
        since = watch.suspected_since
        if since is not None:
            suspicion.trigger = self.triggers[watch.kind].over(since, t)
        told = sentence(suspicion.trigger) if suspicion.trigger is not None else None
        if told is not None:
            suspicion.evidence.append(told)
        suspicion.process = "worker" if kind == "device" else self._grown_role(suspicion.segment)
        return suspicion

    def _grown_role(self, segment: Segment | None) -> str | None:
        if segment is Segment.SHARED and self._shared_roles.known:
            return self._shared_roles.sole()
        return self._roles.largest()
