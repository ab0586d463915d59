"""Detect lost KV cache, memory that ended engines left behind, and kills by the kernel."""

from __future__ import annotations

import math

from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.trace import Sample, SampleLoad
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.segments import compute_device_segments, sum_device_bytes

MIN_IDLE_S = 10.0
"""Time without requests after which blocks in use count as lost; transfers may hold them before."""
MIN_REPORTED_LOSS_RATIO = 0.02
"""Minimum share of the KV cache that must be lost for a report."""
MIN_LOSS_RATIO_FOR_RESTART = 0.10
"""Minimum share of the KV cache that must be lost for a restart."""
CAPACITY_CONFIDENCE = 0.95


class CapacityWatch:
    """Watch of KV cache that is in use and will never be released.

    An engine that accounts for the owners of its blocks reports the loss itself. For others it
    shows only while they are idle; a prefill engine also holds blocks until its connector's
    timeout.
    """

    def __init__(self) -> None:
        self._held_since: float | None = None
        self._standing: Suspicion | None = None
        self._work: tuple[int | None, ...] = ()

    def update(self, sample: Sample) -> Suspicion | None:
        """Add a sample, and return the present loss; None if there is none."""
        reported = _find_reported_loss(sample.load)
        if reported is None:
            return self._find_loss_at_idle(sample)
        self._standing = (
            _make_loss_suspicion(*reported) if reported[0] >= MIN_REPORTED_LOSS_RATIO else None
        )
        return self._standing

    def _find_loss_at_idle(self, sample: Sample) -> Suspicion | None:
        load, usage = sample.load, sample.load.kv_usage_least_ratio
        if usage is None:  # the smallest share of several caches: each of them lost at least this
            usage = load.kv_usage_ratio
        is_idle = load.running == 0 and load.waiting == 0 and not load.inflight
        if usage is None or not 0.0 <= usage <= 1.0 or not is_idle:
            self._held_since = None
            return self._standing
        if usage < MIN_REPORTED_LOSS_RATIO:
            self._held_since = self._standing = None
            return None
        # A short prefill may start and end between two samples. Its blocks are held since then.
        before, self._work = self._work, (load.steps_total, load.prompt_tokens_total)
        if load.kv_lease_s is not None and self._work != before:
            self._held_since = None
        self._held_since = sample.t if self._held_since is None else self._held_since
        if sample.t - self._held_since >= MIN_IDLE_S + (load.kv_lease_s or 0.0):
            self._standing = _make_loss_suspicion(
                usage, "of the KV cache is in use although the engine has no request"
            )
        return self._standing


def _find_reported_loss(load: SampleLoad) -> tuple[float, str] | None:
    shares = (
        (load.kv_lost_ratio, "of the KV cache belongs to no request that a client waits for"),
        (load.offload_lost_ratio, "of the host's KV blocks is pinned without a transfer"),
        (load.encoder_lost_ratio, "of the encoder cache's budget belongs to no running request"),
    )
    known = [(ratio, words) for ratio, words in shares if ratio is not None and 0.0 <= ratio <= 1.0]
    return max(known, default=None)


def _make_loss_suspicion(ratio: float, description: str) -> Suspicion:
    return Suspicion(
        kind=IncidentKind.CAPACITY_LOSS,
        segment=None,
        confidence=CAPACITY_CONFIDENCE,
        consumed_ratio=round(ratio, 4),
        over_budget=ratio >= MIN_LOSS_RATIO_FOR_RESTART,
        process="worker",
        evidence=[f"{ratio:.1%} {description}"],
    )


MIN_LEFT_BEHIND_RATIO = 0.25
"""Share of the host's leak budget from which memory left behind is suspected."""
LEFT_BEHIND_CONFIDENCE = 0.9


class LeftBehindWatch:
    """Watch, across epochs, of shared memory that earlier containers of the engine left in the pod.

    A new epoch has it in its baseline. Files older than the first engine do not count.
    """

    def __init__(self, budget: MemoryBudget | None) -> None:
        self._budget = budget
        self._base: int | None = None
        self._standing: Suspicion | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """Add a sample, and return the suspicion; None if too little was left behind."""
        earlier = sample.host.shm_orphan_earlier
        if self._budget is None or earlier is None:
            return self._standing
        self._base = earlier if self._base is None else min(self._base, earlier)
        left = earlier - self._base
        ratio = left / self._budget.growth_bytes
        self._standing = None
        if ratio >= MIN_LEFT_BEHIND_RATIO:
            self._standing = Suspicion(
                kind=IncidentKind.HOST_GROWTH,
                segment=Segment.SHARED_ORPHAN,
                confidence=LEFT_BEHIND_CONFIDENCE,
                consumed_ratio=round(ratio, 4),
                bytes=left,
                over_budget=ratio >= 1.0,
                evidence=[
                    f"engines that ended left {format_bytes(left)} in /dev/shm; no running "
                    "process maps or opens these files"
                ],
            )
        return self._standing


KILL_REPORT_DURATION_S = 60.0
"""Time for which a kill is reported. Later kills within this time belong to the same incident."""


class OomKillWatch:
    """Watch, across epochs, of kills that the kernel counts in the engine's control group."""

    def __init__(self) -> None:
        self._kills: int | None = None
        self._held: int | None = None
        self._until = -math.inf
        self._suspicion: Suspicion | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """Add a sample, and return the suspicion of a recent kill; None if there is none."""
        host = sample.host
        if host.oom_kills is not None:
            if self._kills is not None and host.oom_kills > self._kills:
                self._until = sample.t + KILL_REPORT_DURATION_S
                self._suspicion = self._make_oom_suspicion(host.oom_kills - self._kills)
            self._kills = host.oom_kills
        held = host.cgroup_current if host.cgroup_current is not None else host.rss_anon
        self._held = self._held if held is None else held
        return self._suspicion if sample.t < self._until else None

    def _make_oom_suspicion(self, count: int) -> Suspicion:
        before = "" if self._held is None else f"; they held {format_bytes(self._held)} just before"
        return Suspicion(
            kind=IncidentKind.OUT_OF_MEMORY_KILL,
            segment=None,
            confidence=1.0,
            consumed_ratio=0.0,
            evidence=[f"the kernel OOM-killed {count} of the engine's processes{before}"],
        )


DRIVER_SETTLE_S = 30.0
"""Time that the driver may take to free the memory of ended processes."""
MIN_ORPHANED_BYTES = 2 << 30
"""Minimum orphaned memory while no engine runs: the driver itself takes about 600 MiB."""
MIN_ADDED_ORPHANED_BYTES = 1 << 30
"""Minimum increase, across a restart, of the memory in use outside the engine."""
ORPHAN_CONFIDENCE = 0.7
WHOLE_DEVICE_NOTE = "this size covers the whole device, including other pods that share it"


class OrphanWatch:
    """Watch, across epochs, of device memory that no living engine holds. It only reports."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._floor: int | None = None
        self._before: int | None = None
        self._since: float | None = None
        self._standing: Suspicion | None = None
        self._dead = False

    def update(self, sample: Sample) -> Suspicion | None:
        """Add a sample, and return the suspicion of orphaned memory; None if there is none."""
        if sample.epoch != self._epoch:
            self._epoch, self._since = sample.epoch, None
            self._before = self._before if self._floor is None else self._floor
            self._floor = None
        found = self._measure_held_memory(sample)
        if found is None:
            return self._standing
        size, least, evidence = found
        if size < least:
            self._since = self._standing = None
            return None
        self._since = sample.t if self._since is None else self._since
        if sample.t - self._since >= DRIVER_SETTLE_S:
            self._standing = Suspicion(
                kind=IncidentKind.ORPHAN_DEVICE_MEMORY,
                segment=Segment.ORPHAN,
                confidence=ORPHAN_CONFIDENCE,
                consumed_ratio=0.0,
                bytes=size,
                evidence=[f"{format_bytes(size)} {evidence}", WHOLE_DEVICE_NOTE],
            )
        return self._standing

    def _measure_held_memory(self, sample: Sample) -> tuple[int, int, str] | None:
        """Return the orphaned bytes, the minimum to report, and a description; None if unknown."""
        if self._dead and sample.host.processes:
            # The next engine may hold the memory, although it has not answered yet.
            self._dead, self._standing, self._since = False, None, None
        used = sum_device_bytes(sample)
        if used is None:
            return None
        if sample.host.processes == 0:
            self._dead = True
            return (
                used,
                MIN_ORPHANED_BYTES,
                "of device memory is in use, but no engine process is running",
            )
        beside = compute_device_segments(sample).get(Segment.NON_TORCH)
        if beside is None:
            return None
        self._floor = beside if self._floor is None else min(self._floor, beside)
        if self._before is None:
            return None
        more = max(0, self._floor - self._before)
        return (
            more,
            MIN_ADDED_ORPHANED_BYTES,
            "more memory than before the restart is in use outside the engine",
        )
