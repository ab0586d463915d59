"""Memory and capacity that are lost: what an engine, its predecessors and the kernel left.

:class:`CapacityWatch`: capacity that is taken, and held by nobody who could give it back. An engine
that keeps books of who holds what tells the loss itself, at any load. Of others it is known at idle
alone: what is held while no request is there. A prefill engine holds the blocks of ended requests
until a decode engine has read them; they count as lost after the connector's timeout.

:class:`LeftBehindWatch`: shared memory that earlier containers of the engine left in the pod.
Within an epoch such memory is part of the host's growth. What an earlier epoch left is part of the
next one's baseline, so that a service which leaves a little at each restart is never over budget,
and one day cannot start: here it is measured from the first epoch on.

:class:`OomKillWatch`: the kernel counts its kills in the engine's control group. Where it kills the
container as a whole the group goes with it, and the operator tells of the kill from the container's
status. What is seen here is the death of one process of several.

:class:`OrphanWatch`: device memory that stays held after the engine's processes have died. No
living process of its container holds it, the next engine's included, which holds its own long
before it answers. Only the whole device can be seen, so that on a device that is shared with other
pods their memory counts as well: this is told and never acted on.
"""

from __future__ import annotations

import math

from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.trace import Sample, SampleLoad
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.segments import device_segments, device_total

IDLE_S = 10.0
"""Transfers of an offload may hold blocks for a moment after the last request."""
MIN_RATIO = 0.02
SPENT_RATIO = 0.10
"""Of the pool, from which on the loss is worth a restart."""
CAPACITY_CONFIDENCE = 0.95


class CapacityWatch:
    """One epoch.

    What was seen stands until the next look shows otherwise: the next answer of an engine that
    tells its loss, the next idle time of one that does not.
    """

    def __init__(self) -> None:
        self._held_since: float | None = None
        self._standing: Suspicion | None = None
        self._work: tuple[int | None, ...] = ()

    def update(self, sample: Sample) -> Suspicion | None:
        """Return the loss that stands."""
        reported = _reported(sample.load)
        if reported is not None:
            ratio, words = reported
            self._standing = _lost(ratio, words) if ratio >= MIN_RATIO else None
            return self._standing
        return self._at_idle(sample)

    def _at_idle(self, sample: Sample) -> Suspicion | None:
        load, usage = sample.load, sample.load.kv_usage_least_ratio
        if usage is None:  # of several caches the smallest share: all of them have lost as much
            usage = load.kv_usage_ratio
        known = load.running is not None and usage is not None and 0.0 <= usage <= 1.0
        if not known or load.running or load.waiting or load.inflight:
            self._held_since = None
            return self._standing
        assert usage is not None
        if usage < MIN_RATIO:
            self._held_since = self._standing = None
            return None
        # A short prefill may run and end between two samples, and its blocks are held from then on.
        before, self._work = self._work, (load.steps_total, load.prompt_tokens_total)
        if load.kv_lease_s is not None and self._work != before:
            self._held_since = None
        self._held_since = sample.t if self._held_since is None else self._held_since
        if sample.t - self._held_since >= IDLE_S + (load.kv_lease_s or 0.0):
            self._standing = _lost(usage, "of the KV cache is in use although there is no request")
        return self._standing


def _reported(load: SampleLoad) -> tuple[float, str] | None:
    """Return the worst share that the engine says is lost, and of what; None if it says none."""
    shares = (
        (load.kv_lost_ratio, "of the KV cache belongs to no request that a client waits for"),
        (load.offload_lost_ratio, "of the host's KV blocks is pinned without a transfer"),
        (load.encoder_lost_ratio, "of the encoder cache's budget belongs to no running request"),
    )
    known = [(ratio, words) for ratio, words in shares if ratio is not None and 0.0 <= ratio <= 1.0]
    return max(known, default=None)


def _lost(ratio: float, words: str) -> Suspicion:
    return Suspicion(
        kind=IncidentKind.CAPACITY_LOSS,
        segment=None,
        confidence=CAPACITY_CONFIDENCE,
        consumed_ratio=round(ratio, 4),
        over_budget=ratio >= SPENT_RATIO,
        process="worker",
        evidence=[f"{ratio:.1%} {words}"],
    )


SUSPECT_RATIO = 0.25
"""Of the host's budget, as for growth within an epoch."""
LEFT_BEHIND_CONFIDENCE = 0.9


class LeftBehindWatch:
    """Outlives epochs.

    What was there before the first engine, such as files of an init container, is nobody's leak.
    Without a budget nothing is suspected.
    """

    def __init__(self, budget: MemoryBudget | None) -> None:
        self._budget = budget
        self._base: int | None = None
        self._standing: Suspicion | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """Return what has been left since the first sample that knew; unknown changes nothing."""
        earlier = sample.host.shm_orphan_earlier
        if self._budget is None or earlier is None:
            return self._standing
        self._base = earlier if self._base is None else min(self._base, earlier)
        left = earlier - self._base
        ratio = left / self._budget.growth_bytes
        self._standing = None
        if ratio >= SUSPECT_RATIO:
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


REPORT_S = 60.0
"""A kill is told for so long; another one within it belongs to the same incident."""


class OomKillWatch:
    """Outlives epochs, for a kill is what ends them."""

    def __init__(self) -> None:
        self._kills: int | None = None
        self._held: int | None = None
        self._until = -math.inf
        self._suspicion: Suspicion | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """Return the kill that is told now.

        A counter that fell is another group's and tells nothing.
        """
        host = sample.host
        if host.oom_kills is not None:
            if self._kills is not None and host.oom_kills > self._kills:
                self._until = sample.t + REPORT_S
                self._suspicion = self._oom_kill(host.oom_kills - self._kills)
            self._kills = host.oom_kills
        held = host.cgroup_current if host.cgroup_current is not None else host.rss_anon
        self._held = self._held if held is None else held
        return self._suspicion if sample.t < self._until else None

    def _oom_kill(self, count: int) -> Suspicion:
        before = "" if self._held is None else f"; they held {format_bytes(self._held)} just before"
        return Suspicion(
            kind=IncidentKind.OUT_OF_MEMORY_KILL,
            segment=None,
            confidence=1.0,
            consumed_ratio=0.0,
            evidence=[f"the kernel OOM-killed {count} of the engine's processes{before}"],
        )


SETTLE_S = 30.0
"""Time for the driver to take back the memory of processes that ended."""
MIN_DEAD_BYTES = 2 << 30
"""NVML counts what the driver reserves for itself as used: some 600 MiB on large devices."""
MIN_MORE_BYTES = 1 << 30
ORPHAN_CONFIDENCE = 0.7
WHOLE_DEVICE = "the figure covers the whole device, including other pods that share it"


class OrphanWatch:
    """Watches what engines leave on their devices; it outlives epochs.

    What an engine leaves behind shows when it is gone, or when its successor finds more in use
    beside its own memory than it did itself.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._floor: int | None = None
        self._before: int | None = None
        self._since: float | None = None
        self._standing: Suspicion | None = None
        self._dead = False

    def update(self, sample: Sample) -> Suspicion | None:
        """Return what is held by nobody now; unknown figures change nothing."""
        if sample.epoch != self._epoch:
            self._epoch, self._since = sample.epoch, None
            self._before = self._before if self._floor is None else self._floor
            self._floor = None
        found = self._held(sample)
        if found is None:
            return self._standing
        size, least, evidence = found
        if size < least:
            self._since = self._standing = None
            return None
        self._since = sample.t if self._since is None else self._since
        if sample.t - self._since >= SETTLE_S:
            self._standing = Suspicion(
                kind=IncidentKind.ORPHAN_DEVICE_MEMORY,
                segment=Segment.ORPHAN,
                confidence=ORPHAN_CONFIDENCE,
                consumed_ratio=0.0,
                bytes=size,
                evidence=[f"{format_bytes(size)} {evidence}", WHOLE_DEVICE],
            )
        return self._standing

    def _held(self, sample: Sample) -> tuple[int, int, str] | None:
        """Bytes, from how many on they count, and what they are."""
        if self._dead and sample.host.processes:
            # Somebody lives who may hold it: the next engine, which has not answered yet.
            self._dead, self._standing, self._since = False, None, None
        used = device_total(sample)
        if used is None:
            return None
        if sample.host.processes == 0:
            self._dead = True
            return (
                used,
                MIN_DEAD_BYTES,
                "of device memory is in use, but no engine process is running",
            )
        beside = device_segments(sample).get(Segment.NON_TORCH)
        if beside is None:
            return None
        self._floor = beside if self._floor is None else min(self._floor, beside)
        if self._before is None:
            return None
        more = max(0, self._floor - self._before)
        return more, MIN_MORE_BYTES, "more than before the restart is in use outside the engine"
