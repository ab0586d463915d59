"""A service's own history of pauses between two signs of progress while work was under way.

It speaks only for what it has seen: with more requests under way, or more prompt tokens taken in
since the last step than ever before, a longer pause may be a long prefill or a compilation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_GAPS = 1000
"""To say what one pause in a thousand exceeds needs that many pauses, or steps that ended one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked of the engine during a pause; zero where the engine does not tell."""

    under_way: int = 0
    prompt_tokens: int = 0


class StepGaps:
    """The longest pause, how many there were, and how fast steps came."""

    def __init__(self) -> None:
        self._total = 0
        self._longest = 0.0
        self._most = Demand()
        self.steps = 0
        self.served_s = 0.0

    def add(self, seconds: float, demand: Demand, steps: int = 1, computed: bool = False) -> None:
        """Take in a pause that ended in progress.

        It was in the last of ``steps``, none of which took longer.

        One in which the engine ``computed`` is a compilation or the like: it says nothing of how
        long the engine is silent without it.
        """
        self.steps += max(1, steps)
        self.served_s += seconds
        self._total += 1
        self._longest = max(self._longest, 0.0 if computed else seconds)
        self._most = Demand(
            max(self._most.under_way, demand.under_way),
            max(self._most.prompt_tokens, demand.prompt_tokens),
        )

    def serve(self, seconds: float, steps: int) -> None:
        """Count time in which ``steps`` were made, by pages that do not show how long each took."""
        self.steps += max(0, steps)
        self.served_s += seconds

    @property
    def longest(self) -> float:
        """The longest pause ever, in seconds."""
        return self._longest

    @property
    def enough(self) -> bool:
        """Whether so many pauses were seen that the longest of them says something."""
        return self._total >= MIN_GAPS

    def chance(self, seconds: float, least_s: float = 0.0) -> float:
        """Return how likely a pause of this length is by the rate of the steps so far.

        It is the predictive distribution of an exponential model whose rate was learnt from them
        alone (Lomax). Steps of less than ``least_s`` count as if they had taken that long.
        """
        if self.served_s <= 0.0:
            return 1.0
        return math.exp(-self.steps * math.log1p(seconds / max(self.served_s, least_s)))

    def covers(self, demand: Demand) -> bool:
        """Whether as much was asked for at once before."""
        return (
            demand.under_way <= self._most.under_way
            and demand.prompt_tokens <= self._most.prompt_tokens
        )
