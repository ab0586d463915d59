"""Turn each sample into the current suspicions, without a clock or I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from plimsoll_api.admin import ProcessNames
from plimsoll_api.assessment import Assessment, Segment, SlowGrowth, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.trace import OpenFiles, Sample
from plimsoll_api.units import format_change
from plimsoll_sidecar.detect import segments
from plimsoll_sidecar.detect.attribution import Owner, ProcessTriggers
from plimsoll_sidecar.detect.growth import Point
from plimsoll_sidecar.detect.leak import MemoryWatch
from plimsoll_sidecar.detect.losses import CapacityWatch, LeftBehindWatch, OomKillWatch, OrphanWatch
from plimsoll_sidecar.detect.segments import LastScrape, RoleSizes
from plimsoll_sidecar.detect.slow_leak import SlowState
from plimsoll_sidecar.detect.stall import StallWatch

MIN_OPEN_FILES_RATIO = 0.8
"""Share of their limit above which open files are evidence, as in PlimsollEngineOpenFilesHigh."""
UNOWNED_SEGMENTS = (
    Segment.SHARED_ORPHAN, Segment.HUGETLB, Segment.KERNEL, Segment.SOCKETS, Segment.CHARGED_OTHER,
)  # fmt: skip
"""Segments that belong to no single process."""
PLIMSOLL_ENGINE_ROLES = ("worker", "frontend")
"""Roles of the processes of Plimsoll's own engine."""
MAX_SHARED_REASON_CHARS = 200
MAX_MISSING_SAMPLES = 30
"""Samples without the chosen source of memory after which another source is chosen."""


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one epoch with which a restarted supervisor continues.

    ``host``, ``device`` and ``in_use`` (device memory that the allocator uses) hold a base for each
    class of load. Roles hold bytes. If ``shared_device`` is not empty, the device's bases cover the
    engine's own memory.
    """

    host: list[Point] = []
    device: list[Point] = []
    in_use: list[Point] = []
    host_owners: dict[str, Owner] = {}
    device_owners: dict[str, Owner] = {}
    in_use_owners: dict[str, Owner] = {}
    roles: dict[str, int] = {}
    shared_roles: dict[str, int] = {}
    host_slow: SlowState = SlowState()
    device_slow: SlowState = SlowState()
    in_use_slow: SlowState = SlowState()
    shared_device: str = ""


class Detector:
    """Detect leaks, stalls and losses of one engine. ``interval_s`` is the time between samples."""

    def __init__(self, memory: MemoryPolicy, stall_timeout_s: float, interval_s: float) -> None:
        self.memory = memory
        self.stall_timeout_s = stall_timeout_s
        self.interval_s = max(0.01, interval_s)
        self._epoch: _Epoch | None = None
        self._last_t = -math.inf
        self._watches = (OomKillWatch(), LeftBehindWatch(memory.host))
        self._orphans = OrphanWatch()
        self._shared, self._configured_shared = "", memory.shared_device
        self._losses: list[Suspicion] = []
        self._open_files: OpenFiles | None = None

    def update(self, sample: Sample) -> Assessment:
        """Add a sample, and return the assessment. An older sample changes nothing."""
        advances = math.isfinite(sample.t) and sample.t > self._last_t
        if self._epoch is None or (advances and self._epoch.number != sample.epoch):
            self._epoch = _Epoch(sample.epoch, self)
        if advances:
            self._last_t = sample.t
            self._mark_device_as_shared(next((d.shared for d in sample.device if d.shared), None))
            self._epoch.update(sample)
            orphans = () if self.memory.shared_device else (self._orphans,)
            losses = [watch.update(sample) for watch in (*self._watches, *orphans)]
            self._losses = [loss for loss in losses if loss is not None]
            self._open_files = sample.host.open_files
        assessment = self._epoch.make_assessment(sample.t)
        assessment.shared_device = self._shared
        suspicions = [*assessment.suspicions, *self._losses]
        assessment.suspicions = _add_open_files(suspicions, self._open_files)
        return assessment

    @property
    def watches(self) -> list[MemoryWatch]:
        """Watches of this epoch: of host memory, device memory, and device memory in use."""
        epoch = self._epoch
        return [] if epoch is None else [epoch.host, epoch.device, epoch.in_use]

    def make_checkpoint(self) -> Checkpoint:
        """Return the state for a later detector; empty until the warm-up has ended."""
        checkpoint = self._epoch.make_checkpoint() if self._epoch else Checkpoint()
        return replace(checkpoint, shared_device=self._shared)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from the state of an earlier detector, in the epoch of the newest sample."""
        self._mark_device_as_shared(checkpoint.shared_device)
        if self.memory.shared_device and not (self._configured_shared or checkpoint.shared_device):
            # The stored bases are of the whole device.
            none = SlowState()
            checkpoint = replace(
                checkpoint, device=[], in_use=[], device_slow=none, in_use_slow=none
            )
        if self._epoch is not None:
            self._epoch.resume(checkpoint, self._last_t)

    def _mark_device_as_shared(self, reason: str | None) -> None:
        """Evaluate only the engine's own device memory from now on, unless ``reason`` is None.

        A device stays shared, because another pod may take any memory that is freed.
        """
        if not reason or self._shared:
            return
        self._shared = reason[:MAX_SHARED_REASON_CHARS]
        if self.memory.shared_device:
            return
        self.memory = replace(self.memory, shared_device=True)
        if self._epoch is not None:
            self._epoch.restart_device_watches(self.memory)


def _add_open_files(suspicions: Iterable[Suspicion], files: OpenFiles | None) -> list[Suspicion]:
    if files is None or files.ratio < MIN_OPEN_FILES_RATIO:
        return list(suspicions)
    text = f"{files.process} has {files.open:,} files open, and its limit is {files.limit:,}"
    return [replace(each, evidence=[*each.evidence, text]) for each in suspicions]


class _Epoch:
    def __init__(self, epoch_number: int, detector: Detector) -> None:
        self.number = epoch_number
        self.memory, self.interval_s = detector.memory, detector.interval_s
        self.host = self._create_watch(IncidentKind.HOST_GROWTH)
        self.device = self._create_watch(IncidentKind.DEVICE_GROWTH)
        self.in_use = self._create_watch(IncidentKind.DEVICE_GROWTH)
        self.stall = StallWatch(detector.stall_timeout_s, detector.interval_s)
        self.capacity = CapacityWatch()
        self.events: list[Suspicion] = []
        self.parts: ProcessNames | None = None
        self._has_ended = False
        self.sizes: dict[Segment, int] = {}
        self.scrape = LastScrape()
        self._source: segments.HostMemoryFields | None = None
        self._missing = 0
        self._device_seen = self._accounted = False
        self._own_devices: set[int] = set()
        self._in_use_missing: int | None = None
        self._roles = RoleSizes(lambda process: process.anonymous)
        self._shared_roles = RoleSizes(lambda process: process.rss_shmem)
        self._used_roles = RoleSizes(lambda process: process.in_use)
        self._retained_roles = RoleSizes(lambda process: process.retained)
        self._triggers = ProcessTriggers()

    def update(self, sample: Sample) -> None:
        self.scrape.update(sample)
        self.parts = sample.parts or self.parts
        if sample.host.processes is not None:
            self._has_ended = sample.host.processes == 0
        events = self.stall.update(sample), self.capacity.update(sample)
        self.events = [event for event in events if event is not None]
        self._update_host(sample)
        self._update_device(sample)

    def restart_device_watches(self, memory: MemoryPolicy) -> None:
        self.memory = memory
        self.device = self._create_watch(IncidentKind.DEVICE_GROWTH)
        self.in_use = self._create_watch(IncidentKind.DEVICE_GROWTH)
        self._device_seen, self._in_use_missing = False, None
        self.sizes.pop(Segment.NON_TORCH, None)

    def make_assessment(self, t: float) -> Assessment:
        on_host = [self.host] if self._source is not None else []
        # Growth of memory in use explains the growth of what its allocator reserves.
        on_device = [self.in_use] if self._in_use_missing is not None else []
        on_device += [self.device] if self._device_seen else []
        suspicions = [s for watch in on_host if (s := self._find_suspicion(watch, t))]
        suspicions += [s for watch in on_device if (s := self._find_suspicion(watch, t))][:1]
        suspicions += self.events
        for suspicion in suspicions:
            suspicion.process = self._find_process_name(suspicion)
        watches = on_host + on_device
        return Assessment(
            t=t,
            epoch=self.number,
            warm=bool(watches) and all(watch.is_warm(t) for watch in watches),
            segments=dict(self.sizes),
            host=self.host.state if on_host else None,
            device=on_device[0].state if on_device else None,
            reserved=on_device[1].state if len(on_device) > 1 else None,
            suspicions=suspicions,
            slow=self._collect_slow_growth(watches),
            in_long_step=self.stall.is_in_long_step,
        )

    def make_checkpoint(self) -> Checkpoint:
        warm = self.host.baseline is not None
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
        stored = checkpoint
        self.host.resume(stored.host, stored.host_owners, stored.host_slow, t)
        self.device.resume(stored.device, stored.device_owners, stored.device_slow, t)
        self.in_use.resume(stored.in_use, stored.in_use_owners, stored.in_use_slow, t)
        self._roles.restore_bases(stored.roles)
        self._shared_roles.restore_bases(stored.shared_roles)

    def _create_watch(self, kind: IncidentKind) -> MemoryWatch:
        return MemoryWatch(kind, self.memory, self.interval_s)

    def _update_host(self, sample: Sample) -> None:
        if self._source is None or self._missing >= MAX_MISSING_SAMPLES:
            source = segments.HostMemoryFields.choose(sample.host)
            if source is not None and source != self._source and self._source is not None:
                self.host = self._create_watch(IncidentKind.HOST_GROWTH)
            self._source = source or self._source
        total = self._source.sum_bytes(sample.host) if self._source else None
        if total is None or self._source is None:
            self._missing += 1
            return
        self._missing = 0
        self._accounted = self._accounted or sample.malloc is not None
        sizes = segments.compute_host_segments(sample, self._source, self._accounted)
        self.sizes.update(sizes)
        warm = self.host.baseline is not None
        processes = sample.host.by_process or []
        for roles in (self._roles, self._shared_roles, self._used_roles, self._retained_roles):
            roles.update(processes, warm)
        if self.memory.host is not None and sample.scrape_ok and len(processes) > 1:
            self._triggers.add(sample.t, processes, sample.load)
        self.host.update(sample, total, sizes, self.scrape)

    def _update_device(self, sample: Sample) -> None:
        shared = self.memory.shared_device
        if shared:
            sample = self._drop_unused_devices(sample)
        total, sizes = segments.sum_device_bytes(sample), segments.compute_device_segments(sample)
        if shared:
            total = segments.sum_torch_bytes(sample, "reserved")
            sizes.pop(Segment.NON_TORCH, None)
        if total is None:
            return
        self._device_seen = True
        self.sizes.update(sizes)
        self.device.update(sample, total, sizes, self.scrape)
        self._update_in_use(sample, total, sizes)

    def _drop_unused_devices(self, sample: Sample) -> Sample:
        self._own_devices |= {one.index for one in sample.device if one.torch is not None}
        own = [one for one in sample.device if one.index in self._own_devices]
        return replace(sample, device=own)

    def _update_in_use(self, sample: Sample, total: int, sizes: dict[Segment, int]) -> None:
        used = dict(sizes)
        unused = used.pop(Segment.TORCH_RESERVED_UNUSED, None)
        if unused is not None and unused <= total:
            self._in_use_missing = 0
            self.in_use.update(sample, total - unused, used, self.scrape)
        elif self._in_use_missing is not None:
            self._in_use_missing += 1
            if self._in_use_missing > MAX_MISSING_SAMPLES:
                self.in_use = self._create_watch(IncidentKind.DEVICE_GROWTH)
                self._in_use_missing = None

    def _collect_slow_growth(self, watches: Iterable[MemoryWatch]) -> dict[str, SlowGrowth]:
        result: dict[str, SlowGrowth] = {}
        for watch in watches:
            before = result.get(watch.memory)
            if watch.slow is not None and (before is None or not before.slow_leak):
                result[watch.memory] = watch.slow
        return result

    def _find_suspicion(self, watch: MemoryWatch, t: float) -> Suspicion | None:
        # The memory of processes that have ended grows no more.
        if self._has_ended:
            return None
        if watch is not self.host:
            found = watch.make_suspicion(t, self.scrape.ledger)
            return None if found is None else replace(found, process="worker")
        found = watch.make_suspicion(
            t,
            self.scrape.ledger,
            lambda segment: self._triggers.find(self._find_grown_role(segment)),
        )
        if found is None:
            return None
        role = self._find_grown_role(found.segment)
        used = self._used_roles.compute_growth(role)
        kept = self._retained_roles.compute_growth(role)
        if used is not None and kept is not None:
            returnable = ", which a trim can return" if kept > 0 else ""
            found.evidence.append(
                f"the allocators of {role} have {format_change(used)} in use than at its base, "
                f"and keep {format_change(kept)}{returnable}"
            )
        return replace(found, process=role)

    def _find_process_name(self, suspicion: Suspicion) -> str | None:
        """Return the suspected process in the engine's own terms; None if unknown."""
        parts = self.parts
        if parts is None or suspicion.process not in PLIMSOLL_ENGINE_ROLES:
            return suspicion.process
        if suspicion.process == "frontend":
            return parts.serves or suspicion.process
        return parts.steps if suspicion.kind is IncidentKind.STALL else parts.runs

    def _find_grown_role(self, segment: Segment | None) -> str | None:
        if segment in UNOWNED_SEGMENTS:
            return None  # the process that created it has ended
        if segment is Segment.SHARED and self._shared_roles.known:
            return self._shared_roles.find_majority()
        return self._roles.find_largest()
