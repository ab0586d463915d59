"""The time of decisions: wall-clock seconds that no step of the wall clock can bend.

Waits and deadlines of an incident are differences of these times. A clock that is set forward by an
hour must not end them early (a verification that seems late leads to the next restart), one that is
set back must not make them endless.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 5.0
"""What a clock may differ by before it was set: slewing and scheduling stay far below."""


class SteadyClock:
    """Unix seconds that go on with the monotonic clock."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._offset = wall() - monotonic()

    def now(self, follow: bool) -> float:
        """The time now. ``follow`` says that nothing waits: a step of the wall clock is taken
        over then, so that later times are right."""
        offset = self._wall() - self._monotonic()
        if follow and abs(offset - self._offset) > STEP_S:
            self._offset = offset
        return self._monotonic() + self._offset
