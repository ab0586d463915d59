"""Count the full garbage collections of a process, and the objects that they free.

Reference counting frees requests, so a collection that frees objects while the engine serves shows
a reference cycle.
"""

from __future__ import annotations

import gc
from typing import Literal

OLDEST_GENERATION = 2


class FullCollectionCounter:
    """Counter of full garbage collections between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self.runs = 0
        self.collected = 0

    def start(self) -> None:
        """Reset the counts and start counting."""
        self.stop()
        self.runs = self.collected = 0
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Stop counting. Idempotent."""
        while self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == OLDEST_GENERATION:
            self.runs += 1
            self.collected += info["collected"]
