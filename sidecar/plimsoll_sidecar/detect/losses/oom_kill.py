"""Kills for memory: the kernel counts them in the engine's control group.

Where the kernel kills the container as a whole the group goes with it, and the operator tells of
the kill from the container's status. What is seen here is the death of one process of several.
"""

from __future__ import annotations

import math

from plimsoll_api.assessment import Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.trace import Sample
from plimsoll_api.units import format_bytes

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
