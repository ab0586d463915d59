"""Shared memory that earlier containers of the engine left in the pod.

Within an epoch such memory is part of the host's growth. What an earlier epoch left is part of the
next one's baseline, so that a service which leaves a little at each restart is never over budget,
and one day cannot start: here it is measured from the first epoch on.
"""

from __future__ import annotations

from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.trace import Sample
from plimsoll_api.units import format_bytes

SUSPECT_RATIO = 0.25
"""Of the host's budget, as for growth within an epoch."""
CONFIDENCE = 0.9


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
                confidence=CONFIDENCE,
                consumed_ratio=round(ratio, 4),
                bytes=left,
                over_budget=ratio >= 1.0,
                evidence=[
                    f"engines that ended left {format_bytes(left)} in /dev/shm; no running "
                    "process maps or opens these files"
                ],
            )
        return self._standing
