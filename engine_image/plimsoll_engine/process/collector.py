"""What the full collections of a process find.

No request of ours needs the collector to die, so in steady state a collection of the oldest
generation finds nothing: whatever it finds is a cycle that somebody made. The frontend and the
worker count, and report the count with their memory.
"""

from __future__ import annotations

import gc
from typing import Literal

OLDEST = 2


class FullCollections:
    """Counts between :meth:`start` and :meth:`stop`, which are paired like freeze and unfreeze."""

    def __init__(self) -> None:
        self.runs = 0
        self.collected = 0

    def start(self) -> None:
        """Forget what was counted before, and count."""
        self.stop()
        self.runs = self.collected = 0
        gc.callbacks.append(self._seen)

    def stop(self) -> None:
        """Again does nothing more."""
        while self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)

    def _seen(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == OLDEST:
            self.runs += 1
            self.collected += info["collected"]
