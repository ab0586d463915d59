"""A service's own history of pauses between two signs of progress while work was under way.

It speaks only for what it has seen: with more requests under way, or more prompt tokens taken in
since the last step than ever before, a longer pause may be a long prefill or a compilation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

QUANTILE = 0.999
LEAST_PAUSES = 1000
"""A quantile of one in a thousand needs that many pauses; before, the history says nothing."""
MOST_PAUSES = 200_000
"""Then every count is halved: an engine that became slower is believed within a day or two."""
GROWTH = 1.25
SMALLEST_S = 0.1
BINS = 48
"""Up to 3,600 s; the last bin holds all that is longer."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked of the engine during a pause; zero where the engine does not tell."""

    under_way: int = 0
    prompt_tokens: int = 0


class Pauses:
    """Counts of pauses by their length, in bins that grow by a quarter."""

    def __init__(self) -> None:
        self._counts = [0] * BINS
        self._total = 0
        self._longest = 0.0
        self._most = Demand()

    def add(self, seconds: float, demand: Demand) -> None:
        """A pause that ended in progress."""
        self._counts[_bin(seconds)] += 1
        self._total += 1
        self._longest = max(self._longest, seconds)
        self._most = Demand(
            max(self._most.under_way, demand.under_way),
            max(self._most.prompt_tokens, demand.prompt_tokens),
        )
        if self._total > MOST_PAUSES:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)

    def usual_s(self) -> float | None:
        """The pause that one in a thousand exceeds (to a quarter); None before enough were seen."""
        if self._total < LEAST_PAUSES:
            return None
        rest, seen = QUANTILE * self._total, 0
        for number, count in enumerate(self._counts):
            seen += count
            if seen >= rest:
                return min(self._longest, SMALLEST_S * GROWTH**number)
        return self._longest

    def longest_s(self, demand: Demand) -> float | None:
        """The longest pause ever; None where the history does not cover ``demand``."""
        covered = (
            demand.under_way <= self._most.under_way
            and demand.prompt_tokens <= self._most.prompt_tokens
        )
        return self._longest if covered and self._total >= LEAST_PAUSES else None


def _bin(seconds: float) -> int:
    """The first bin whose upper edge is not below ``seconds``."""
    if seconds <= SMALLEST_S:
        return 0
    return min(BINS - 1, math.ceil(math.log(seconds / SMALLEST_S, GROWTH) - 1e-9))
