"""Capacity that is lost: KV blocks that are held while no request is there to hold them."""

from __future__ import annotations

from plimsoll_sidecar.detect.assessment import Kind, Suspicion
from plimsoll_sidecar.trace import Sample

IDLE_S = 10.0
"""Transfers of an offload may hold blocks for a moment after the last request."""
LEAST_RATIO = 0.02
SPENT_RATIO = 0.10
"""Of the pool, from which on the loss is worth a restart."""
CONFIDENCE = 0.95


class CapacityWatch:
    """One epoch. What was seen at idle stands until the next idle time shows otherwise."""

    def __init__(self) -> None:
        self._held_since: float | None = None
        self._standing: Suspicion | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """The loss that stands. While requests are under way nobody can tell theirs from it."""
        load, usage = sample.load, sample.load.kv_usage_ratio
        known = load.running is not None and usage is not None and 0.0 <= usage <= 1.0
        if not known or load.running or load.waiting or load.inflight:
            self._held_since = None
            return self._standing
        assert usage is not None
        if usage < LEAST_RATIO:
            self._held_since = self._standing = None
            return None
        self._held_since = sample.t if self._held_since is None else self._held_since
        if sample.t - self._held_since >= IDLE_S:
            self._standing = _lost(usage)
        return self._standing


def _lost(usage: float) -> Suspicion:
    return Suspicion(
        kind=Kind.CAPACITY_LOSS,
        segment=None,
        confidence=CONFIDENCE,
        consumed_ratio=round(usage, 4),
        over_budget=usage >= SPENT_RATIO,
        evidence=[f"{usage:.1%} of the key-value cache is held while no request is there"],
    )
