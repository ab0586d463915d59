"""Capacity that is lost: taken, and held by nobody who could give it back.

An engine that keeps books of who holds what tells the loss itself, at any load. Of others it is
known at idle alone: what is held while no request is there.
"""

from __future__ import annotations

from plimsoll_api.assessment import Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.trace import Sample, SampleLoad

IDLE_S = 10.0
"""Transfers of an offload may hold blocks for a moment after the last request."""
MIN_RATIO = 0.02
SPENT_RATIO = 0.10
"""Of the pool, from which on the loss is worth a restart."""
CONFIDENCE = 0.95


class CapacityWatch:
    """One epoch.

    What was seen stands until the next look shows otherwise: the next answer of an engine that
    tells its loss, the next idle time of one that does not.
    """

    def __init__(self) -> None:
        self._held_since: float | None = None
        self._standing: Suspicion | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """Return the loss that stands."""
        reported = _reported(sample.load)
        if reported is not None:
            ratio, words = reported
            self._standing = _lost(ratio, words) if ratio >= MIN_RATIO else None
            return self._standing
        return self._at_idle(sample)

    def _at_idle(self, sample: Sample) -> Suspicion | None:
        load, usage = sample.load, sample.load.kv_usage_ratio
        known = load.running is not None and usage is not None and 0.0 <= usage <= 1.0
        if not known or load.running or load.waiting or load.inflight:
            self._held_since = None
            return self._standing
        assert usage is not None
        if usage < MIN_RATIO:
            self._held_since = self._standing = None
            return None
        self._held_since = sample.t if self._held_since is None else self._held_since
        if sample.t - self._held_since >= IDLE_S:
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
        confidence=CONFIDENCE,
        consumed_ratio=round(ratio, 4),
        over_budget=ratio >= SPENT_RATIO,
        process="worker",
        evidence=[f"{ratio:.1%} {words}"],
    )
