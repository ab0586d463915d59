"""The present epoch, its fence, and how many crashes are too many. Pure."""

from __future__ import annotations

import secrets
from collections import deque

from plimsoll_api.admin import Epoch

# Three crashes within a minute: the fault is not in a worker's state, so a further fork will not
# cure it; the kubelet's restart with its back-off takes over.
CRASH_LIMIT = 3
CRASH_WINDOW_S = 60.0


class StaleEpoch(Exception):
    """A call that was decided on another epoch."""


class Epochs:
    """Number 0 means that no worker was started yet.

    A number is reserved for each worker that is forked and never used again; the epoch begins when
    that worker takes over. A successor that fails while it prepares has no epoch.
    """

    def __init__(self, boot_id: str | None = None) -> None:
        self.current = Epoch(boot_id or secrets.token_hex(4), 0)
        self._reserved = 0

    def reserve(self) -> Epoch:
        """The epoch of a worker that is about to be forked."""
        self._reserved += 1
        return Epoch(self.current.boot_id, self._reserved)

    def enter(self, epoch: Epoch) -> None:
        """``epoch`` begins. ValueError for one that is not later than the present one."""
        if epoch <= self.current:
            raise ValueError(f"epoch {epoch} is not later than {self.current}")
        self.current = epoch

    def check(self, expected: str) -> None:
        """Raise :class:`StaleEpoch` unless ``expected`` is now, ValueError if it is no epoch."""
        if Epoch.parse(expected) != self.current:
            raise StaleEpoch(
                f"this call was decided on epoch {expected}, the engine is in {self.current}: "
                "read /admin/v1/status and decide again"
            )


class CrashBudget:
    """How many crashes within ``window_s`` are borne."""

    def __init__(self, limit: int = CRASH_LIMIT, window_s: float = CRASH_WINDOW_S) -> None:
        self._limit = limit
        self._window_s = window_s
        self._times: deque[float] = deque(maxlen=limit)

    def spend(self, now: float) -> bool:
        """Count a crash at ``now`` (monotonic seconds); False when it was one too many."""
        self._times.append(now)
        return len(self._times) < self._limit or now - self._times[0] > self._window_s
