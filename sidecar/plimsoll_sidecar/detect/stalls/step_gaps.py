"""A service's own history of pauses between two signs of progress while work was under way.

It speaks only for what it has seen: with more requests under way, or more prompt tokens taken in
since the last step than ever before, a longer pause may be a long prefill or a compilation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plimsoll_sidecar.detect.stalls.usual_pauses import UsualPauses

LONG_PAUSE_S = 3.0
"""Steps take milliseconds, or a second with a large prompt: one that takes longer compiles, moves
much at once, waits for another process, or hangs."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked of the engine during a pause; zero where the engine does not tell."""

    under_way: int = 0
    prompt_tokens: int = 0


class StepGaps:
    """The longest pause, the long ones together, and how fast steps came."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._most = Demand()
        self.usual = UsualPauses()
        self.steps = 0
        self.served_s = 0.0

    def add(
        self,
        silent_s: float,
        demand: Demand,
        steps: int = 1,
        computed: bool = False,
        interval_s: float = 0.0,
    ) -> None:
        """Take in a pause that ended in progress.

        It was in the last of ``steps``, none of which took longer. No progress showed for
        ``silent_s``, and the pause ended within the ``interval_s`` after that.

        One in which the engine ``computed`` is a compilation or the like: it says nothing of how
        long the engine is silent without it.
        """
        seconds = silent_s + interval_s
        self.steps += max(1, steps)
        self.served_s += seconds
        if not computed:
            self._longest = max(self._longest, seconds)
            if silent_s >= LONG_PAUSE_S:
                self.usual.add(seconds, interval_s)
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
