"""Whose grammar is compiled next: fair between tenants, then between small and large ones. Pure.

A tenant has one compilation under way at a time, and of the tenants that wait the one whose
grammars took the fewest seconds is next. Among a tenant's own, small and large texts take turns by
the same rule, so a short expression is not behind thirty long ones. A tenant's seconds begin,
whenever it comes back, at the lowest of those that are here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

SMALL_CHARACTERS = 4 << 10


@dataclass(frozen=True, slots=True)
class Waiting:
    """One compilation. ``large``: by the length of its text."""

    number: int
    tenant: str
    large: bool


class GrammarQueue:
    """Numbers of compilations, each of a tenant; at most ``slots`` of them are under way."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: dict[int, Waiting] = {}
        """In the order of arrival."""
        self._under_way: dict[int, Waiting] = {}
        self._seconds: dict[str, float] = {}
        self._seconds_of: defaultdict[tuple[str, bool], float] = defaultdict(float)

    def __len__(self) -> int:
        """Compilations that wait."""
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        """How many grammars are being compiled."""
        return len(self._under_way)

    def add(self, number: int, tenant: str, characters: int) -> None:
        """Queue a grammar of so many characters.

        A tenant that is new starts level with the least served.
        """
        if tenant not in self._seconds:
            self._seconds[tenant] = min(self._seconds.values(), default=0.0)
        self._waiting[number] = Waiting(number, tenant, characters > SMALL_CHARACTERS)

    def take(self) -> int | None:
        """Return the next one, which is under way from now on; None where none may begin."""
        if len(self._under_way) >= self._slots:
            return None
        busy = {one.tenant for one in self._under_way.values()}
        free = [one for one in self._waiting.values() if one.tenant not in busy]
        if not free:
            return None
        # min keeps the first, and so the oldest, of equals.
        one = min(
            free,
            key=lambda w: (self._seconds[w.tenant], self._seconds_of[w.tenant, w.large]),
        )
        self._under_way[one.number] = self._waiting.pop(one.number)
        return one.number

    def discard(self, number: int) -> bool:
        """Nobody waits for it any more; False where it is under way, and then goes on."""
        one = self._waiting.pop(number, None)
        if one is None:
            return False
        self._forget(one.tenant)
        return True

    def done(self, number: int, seconds: float) -> None:
        """Charge a tenant with the seconds that its compilation took."""
        one = self._under_way.pop(number)
        self._seconds[one.tenant] += seconds
        self._seconds_of[one.tenant, one.large] += seconds
        self._forget(one.tenant)

    def _forget(self, tenant: str) -> None:
        """Drop the account of a tenant without any compilation."""
        here = (*self._waiting.values(), *self._under_way.values())
        if all(one.tenant != tenant for one in here):
            del self._seconds[tenant]
            for large in (False, True):
                self._seconds_of.pop((tenant, large), None)
