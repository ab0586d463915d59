"""Order grammar compilations fairly between tenants, and between small and large grammars. Pure.

A tenant has at most one compilation in progress. The next compilation is that of the waiting tenant
whose compilations took the least time in total. The same rule decides between the small and the
large grammars of a tenant.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

MAX_SMALL_GRAMMAR_CHARACTERS = 4 << 10


@dataclass(frozen=True, slots=True)
class QueuedCompilation:
    """Compilation in the queue."""

    compilation_number: int
    tenant: str
    large: bool  # longer than MAX_SMALL_GRAMMAR_CHARACTERS


class GrammarQueue:
    """Queue of compilations, identified by numbers, of which ``max_in_progress`` run at a time."""

    def __init__(self, max_in_progress: int) -> None:
        self._slots = max_in_progress
        # In the order of arrival.
        self._waiting: dict[int, QueuedCompilation] = {}
        self._in_progress: dict[int, QueuedCompilation] = {}
        self._seconds: dict[str, float] = {}
        self._seconds_of: defaultdict[tuple[str, bool], float] = defaultdict(float)

    def __len__(self) -> int:
        """Return the number of waiting compilations."""
        return len(self._waiting)

    @property
    def num_in_progress(self) -> int:
        """Number of compilations in progress."""
        return len(self._in_progress)

    def add(self, compilation_number: int, tenant: str, num_characters: int) -> None:
        """Queue a compilation for ``tenant``. Its grammar has ``num_characters`` characters."""
        if tenant not in self._seconds:
            self._seconds[tenant] = min(self._seconds.values(), default=0.0)
        self._waiting[compilation_number] = QueuedCompilation(
            compilation_number, tenant, num_characters > MAX_SMALL_GRAMMAR_CHARACTERS
        )

    def start_next(self) -> int | None:
        """Mark the next compilation as started and return its number; None if none may start."""
        if len(self._in_progress) >= self._slots:
            return None
        busy = {one.tenant for one in self._in_progress.values()}
        free = [one for one in self._waiting.values() if one.tenant not in busy]
        if not free:
            return None
        # If several are equal, min returns the first, which is the oldest.
        one = min(
            free,
            key=lambda w: (self._seconds[w.tenant], self._seconds_of[w.tenant, w.large]),
        )
        self._in_progress[one.compilation_number] = self._waiting.pop(one.compilation_number)
        return one.compilation_number

    def discard(self, compilation_number: int) -> bool:
        """Remove a waiting compilation. Return False if it is already in progress."""
        one = self._waiting.pop(compilation_number, None)
        if one is None:
            return False
        self._forget_if_absent(one.tenant)
        return True

    def finish(self, compilation_number: int, seconds: float) -> None:
        """Remove a compilation that has ended, and add ``seconds`` to the time of its tenant."""
        one = self._in_progress.pop(compilation_number)
        self._seconds[one.tenant] += seconds
        self._seconds_of[one.tenant, one.large] += seconds
        self._forget_if_absent(one.tenant)

    def _forget_if_absent(self, tenant: str) -> None:
        here = (*self._waiting.values(), *self._in_progress.values())
        if all(one.tenant != tenant for one in here):
            del self._seconds[tenant]
            for large in (False, True):
                self._seconds_of.pop((tenant, large), None)
