"""The detector: one sample in, everything that is suspected now out. Pure: no clock, no I/O.

State belongs to one epoch and stays bounded however long that lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from plimsoll_api.admin import Parts
from plimsoll_api.assessment import Assessment, Segment, SlowGrowth, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.trace import OpenFiles, Sample
from plimsoll_sidecar.detect import segments
from plimsoll_sidecar.detect.attribution import Owner
from plimsoll_sidecar.detect.growth import Point
from plimsoll_sidecar.detect.leak import AttributedBudget
from plimsoll_sidecar.detect.losses import CapacityWatch, LeftBehindWatch, OomKillWatch, OrphanWatch
from plimsoll_sidecar.detect.segments import LastScrape, Roles
from plimsoll_sidecar.detect.slow_leak import SlowState
from plimsoll_sidecar.detect.stall import StallWatch

OPEN_FILES_RATIO = 0.8
"""From this share of the limit on, open files are evidence: at the limit, a process accepts no
connection any more. The alert PlimsollEngineOpenFilesHigh begins there, too."""
UNUSED = Segment.TORCH_RESERVED_UNUSED
NOBODYS = (
    Segment.SHARED_ORPHAN, Segment.HUGETLB, Segment.KERNEL, Segment.SOCKETS, Segment.CHARGED_OTHER,
)  # fmt: skip
"""Segments of which no process's own figures tell whose they are."""
OURS = ("worker", "frontend")
"""Processes as our own engine calls them."""
MAX_SHARED_REASON = 200
SOURCE_PATIENCE = 30
"""Samples without the chosen source of host memory before another is chosen (new baseline)."""


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bases of one epoch, one for each class of load.

    They are of host, device, and device without what its allocator keeps unused. Then the owners of
    the ledger by name, for each of the three; null is of a release that kept none. Then each role's
    size (anonymous, and shared), and the hours in which slow growth is looked for.

    ``shared_device`` is the assessment's: the device's bases are then of the engine's own memory.
    Without them a new detector would take memory that has leaked for its baseline.
    """

    host: list[Point] = []
    device: list[Point] = []
    in_use: list[Point] = []
    host_owners: dict[str, Owner] | None = None
    device_owners: dict[str, Owner] | None = None
    in_use_owners: dict[str, Owner] | None = None
    roles: dict[str, int] = {}
    shared_roles: dict[str, int] = {}
    host_slow: SlowState = SlowState()
    device_slow: SlowState = SlowState()
    in_use_slow: SlowState = SlowState()
    shared_device: str = ""


class Detector:
    """Judges one engine. ``interval_s`` is the expected time between samples."""

    def __init__(self, memory: MemoryPolicy, stall_timeout_s: float, interval_s: float) -> None:
        self.memory = memory
        self.stall_timeout_s = stall_timeout_s
        self.interval_s = max(0.01, interval_s)
        self._epoch: _Epoch | None = None
        self._last_t = -math.inf
        self._orphans: OrphanWatch | None = None if memory.shared_device else OrphanWatch()
        self._watches = (OomKillWatch(), LeftBehindWatch(memory.host))
        self._shared, self._given = "", memory.shared_device
        self._losses: list[Suspicion] = []
        self._open_files: OpenFiles | None = None

    def update(self, sample: Sample) -> Assessment:
        """Return the view after ``sample``. One whose time does not go forward changes nothing."""
        forward = math.isfinite(sample.t) and sample.t > self._last_t
        if self._epoch is None or (forward and self._epoch.number != sample.epoch):
            self._epoch = _Epoch(sample.epoch, self)
        if forward:
            self._last_t = sample.t
            self._share(next((one.shared for one in sample.device if one.shared), None))
            self._epoch.update(sample)
            watches = (*self._watches, self._orphans) if self._orphans else self._watches
            found = [watch.update(sample) for watch in watches]
            self._losses = [suspicion for suspicion in found if suspicion is not None]
            self._open_files = sample.host.open_files
        assessment = self._epoch.assessment(sample.t)
        assessment.shared_device = self._shared
        suspicions = [*assessment.suspicions, *self._losses]
        assessment.suspicions = _with_open_files(suspicions, self._open_files)
        return assessment

    @property
    def budgets(self) -> list[AttributedBudget]:
        """The budgets of the epoch: host, device, and the device without what is kept unused."""
        epoch = self._epoch
        return [] if epoch is None else [epoch.host, epoch.device, epoch.in_use]

    def checkpoint(self) -> Checkpoint:
        """Return what a later detector of the same epoch needs.

        Empty before the warm-up has ended.
        """
        found = self._epoch.checkpoint() if self._epoch else Checkpoint()
        return msgspec.structs.replace(found, shared_device=self._shared)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from what an earlier detector found in the epoch of the newest sample."""
        self._share(checkpoint.shared_device)
        if self.memory.shared_device and not self._given and not checkpoint.shared_device:
            # These were of the whole device.
            none: dict[str, Any] = {"device": [], "in_use": [], "in_use_slow": SlowState()}
            checkpoint = msgspec.structs.replace(checkpoint, **none, device_slow=SlowState())
        if self._epoch is not None:
            self._epoch.resume(checkpoint, self._last_t)

    def _share(self, how: str | None) -> None:
        """From now on, judge only what is the engine's own on a device that others use.

        It stands for as long as this detector: what a neighbour has freed, another may take. Whose
        memory it is that nobody holds cannot be said there either.
        """
        if not how or self._shared:
            return
        self._shared = how[:MAX_SHARED_REASON]
        if self.memory.shared_device:
            return
        self.memory, self._orphans = msgspec.structs.replace(self.memory, shared_device=True), None
        if self._epoch is not None:
            self._epoch.share(self.memory)


def _with_open_files(suspicions: Iterable[Suspicion], files: OpenFiles | None) -> list[Suspicion]:
    """Return the suspicions, each with a sentence on the files if they are near the limit."""
    if files is None or files.ratio < OPEN_FILES_RATIO:
        return list(suspicions)
    sentence = f"{files.process} has {files.open:,} files open, and its limit is {files.limit:,}"
    return [msgspec.structs.replace(one, evidence=[*one.evidence, sentence]) for one in suspicions]


class _Epoch:
    """Everything known about one epoch."""

    def __init__(self, number: int, detector: Detector) -> None:
        self.number = number
        self.memory, self.interval_s = detector.memory, detector.interval_s
        self.host = self._budget(IncidentKind.HOST_GROWTH)
        self.device = self._budget(IncidentKind.DEVICE_GROWTH)
        self.in_use = self._budget(IncidentKind.DEVICE_GROWTH)
        self.stall = StallWatch(detector.stall_timeout_s, detector.interval_s)
        self.stalled: Suspicion | None = None
        self.capacity = CapacityWatch()
        self.lost: Suspicion | None = None
        self.parts: Parts | None = None
        self.sizes: dict[Segment, int] = {}
        self.scrape = LastScrape()
        self._source: segments.HostSource | None = None
        self._missing = 0
        self._device_seen = self._accounted = False
        self._in_use_missing: int | None = None
        self._roles = Roles(lambda process: process.anonymous)
        self._shared_roles = Roles(lambda process: process.rss_shmem)

    def update(self, sample: Sample) -> None:
        self.scrape.update(sample)
        self.parts = sample.parts or self.parts
        self.stalled = self.stall.update(sample)
        self.lost = self.capacity.update(sample)
        self._take_host(sample)
        self._take_device(sample)

    def share(self, memory: MemoryPolicy) -> None:
        """Begin anew on the device: what was measured there is not the engine's alone."""
        self.memory = memory
        self.device = self._budget(IncidentKind.DEVICE_GROWTH)
        self.in_use = self._budget(IncidentKind.DEVICE_GROWTH)
        self._device_seen, self._in_use_missing = False, None
        self.sizes.pop(Segment.NON_TORCH, None)

    def assessment(self, t: float) -> Assessment:
        budgets = [self.host] if self._source is not None else []
        # Growth of what is in use explains the growth of what its allocator reserves.
        on_device = [self.in_use] if self._in_use_missing is not None else []
        on_device += [self.device] if self._device_seen else []
        suspicions = [s for s in (self._growth(budget, t) for budget in budgets) if s is not None]
        found = (self._growth(budget, t) for budget in on_device)
        suspicions += [s for s in found if s is not None][:1]
        budgets += on_device
        suspicions += [one for one in (self.stalled, self.lost) if one is not None]
        for one in suspicions:
            one.process = self._called(one)
        return Assessment(
            t=t,
            epoch=self.number,
            warm=bool(budgets) and all(budget.watch.warm(t) for budget in budgets),
            segments=dict(self.sizes),
            host=self.host.watch.state if self._source is not None else None,
            device=on_device[0].watch.state if on_device else None,
            reserved=on_device[1].watch.state if len(on_device) > 1 else None,
            suspicions=suspicions,
            slow=self._slow(budgets),
            in_long_step=self.stall.in_long_step,
        )

    def checkpoint(self) -> Checkpoint:
        warm = self.host.watch.baseline is not None
        return Checkpoint(
            host=self.host.bases,
            device=self.device.bases,
            in_use=self.in_use.bases,
            host_owners=self.host.owners,
            device_owners=self.device.owners,
            in_use_owners=self.in_use.owners,
            roles=self._roles.bases if warm else {},
            shared_roles=self._shared_roles.bases if warm else {},
            host_slow=self.host.slow_state,
            device_slow=self.device.slow_state,
            in_use_slow=self.in_use.slow_state,
        )

    def resume(self, checkpoint: Checkpoint, t: float) -> None:
        one = checkpoint
        self.host.resume(one.host, one.host_owners, one.host_slow, t)
        self.device.resume(one.device, one.device_owners, one.device_slow, t)
        self.in_use.resume(one.in_use, one.in_use_owners, one.in_use_slow, t)
        self._roles.resume(checkpoint.roles)
        self._shared_roles.resume(checkpoint.shared_roles)

    def _slow(self, budgets: Iterable[AttributedBudget]) -> dict[str, SlowGrowth]:
        """Return what is known of slow growth: on the device, first of what is in use there."""
        found: dict[str, SlowGrowth] = {}
        for budget in budgets:
            slow, before = budget.slow, found.get(budget.memory)
            if slow is not None and (before is None or not before.slow_leak):
                found[budget.memory] = slow
        return found

    def _budget(self, kind: IncidentKind) -> AttributedBudget:
        return AttributedBudget(kind, self.memory, self.interval_s)

    # ---- one sample

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
            roles.update(sample.host.by_process or [], self.host.watch.baseline is not None)
        self._take(self.host, sample, total, sizes)

    def _choose_source(self, sample: Sample) -> None:
        source = segments.HostSource.best(sample.host)
        if source is not None and source != self._source and self._source is not None:
            self.host = self._budget(IncidentKind.HOST_GROWTH)
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
        self._take(self.device, sample, total, sizes)
        self._take_in_use(sample, total, sizes)

    def _take_in_use(self, sample: Sample, total: int, sizes: dict[Segment, int]) -> None:
        """Take in what the engine holds on its devices, without what is kept for later.

        A leak that fills such room shows here long before the device has less to give.
        """
        unused = segments.device_unused(sample)
        if unused is not None and unused <= total:
            self._in_use_missing = 0
            held = {name: size for name, size in sizes.items() if name is not UNUSED}
            self._take(self.in_use, sample, total - unused, held)
        elif self._in_use_missing is not None:
            self._in_use_missing += 1
            if self._in_use_missing > SOURCE_PATIENCE:
                self.in_use = self._budget(IncidentKind.DEVICE_GROWTH)
                self._in_use_missing = None

    def _take(
        self, budget: AttributedBudget, sample: Sample, total: int, sizes: dict[Segment, int]
    ) -> None:
        budget.take(sample, total, sizes, self.scrape, self.stall.in_long_step)

    # ---- which process it is

    def _growth(self, budget: AttributedBudget, t: float) -> Suspicion | None:
        suspicion = budget.suspicion(t, self.scrape.ledger)
        if suspicion is not None:
            on_host = budget is self.host
            suspicion.process = self._grown_role(suspicion.segment) if on_host else "worker"
        return suspicion

    def _called(self, suspicion: Suspicion) -> str | None:
        """Return the process as the engine calls it.

        An engine that is not ours has no worker: there it is the process that makes the steps, or
        that runs the model; None where nobody knows it.
        """
        parts = self.parts
        if parts is None or suspicion.process not in OURS:
            return suspicion.process
        if suspicion.process == "frontend":
            return parts.serves or suspicion.process
        return parts.steps if suspicion.kind is IncidentKind.STALL else parts.runs

    def _grown_role(self, segment: Segment | None) -> str | None:
        if segment in NOBODYS:
            return None  # whoever made it has ended
        if segment is Segment.SHARED and self._shared_roles.known:
            return self._shared_roles.sole()
        return self._roles.largest()
