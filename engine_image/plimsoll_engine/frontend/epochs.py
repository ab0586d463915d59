"""The present epoch, its fence, and how many crashes are too many."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from plimsoll_api.admin import Epoch

CRASH_DELAYS_S = (0.0, 0.0, 1.0, 2.0, 4.0)
"""What each crash in a row is waited for before the next worker; one more ends the engine. The
first two may be chance. A fault that is not in a worker's state is not cured by a further fork: the
kubelet's restart with its back-off of 10 s and more takes over. Until then the requests are held.
"""
SETTLED_S = 60.0
"""A worker that has served for so long ends a row of crashes."""


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
        """Return the epoch of a worker that is about to be forked."""
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
                f"the call is for epoch {expected}, but the engine is in epoch {self.current}: "
                "read /admin/v1/status and decide again"
            )


class CrashBudget:
    """How many crashes in a row are tolerated, and how long each is waited for.

    One that :meth:`serves` for ``settled_s`` seconds ends the row, however it ends.
    """

    def __init__(
        self,
        delays_s: Sequence[float] = CRASH_DELAYS_S,
        settled_s: float = SETTLED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._delays_s = delays_s
        self._settled_s = settled_s
        self._clock = clock
        self._row = 0
        self._since: float | None = None

    def serves(self) -> None:
        """Note that one serves from now on."""
        self._since = self._clock()

    def spend(self) -> float | None:
        """Count a crash, or a start that failed.

        Returns the seconds to wait before the next one, None when it was one too many.
        """
        if self._since is not None and self._clock() - self._since >= self._settled_s:
            self._row = 0
        self._since = None
        self._row += 1
        return self._delays_s[self._row - 1] if self._row <= len(self._delays_s) else None
