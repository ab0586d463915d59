"""The odds that a growth is a leak, against everything else that it may be.

A leak competes with six explanations. Each has a weight of evidence for the leak and against it, in
natural logarithms of odds, as in a naive Bayes classifier: what it is worth at the start, and how
that changes with what is seen. All of them lose as the growth takes more of the budget, because
what is bounded ends somewhere, and a person chose the budget with that in mind; and as it takes it
faster, because engines that are healthy hardly ever spend a day's budget within minutes. The rest
is peculiar to each: memory that fills something up grows slower and slower, garbage does not
outlast collections, and so on. The chance of a leak follows from the sum over the explanations.

The weights are no opinions: ``python -m bench.odds_fit`` finds them by maximum likelihood on the
labelled runs of the leak lab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from plimsoll_api.assessment import Segment
from plimsoll_sidecar.detect.leak.trend import Trend

REUSABLE = frozenset({Segment.MALLOC_RETAINED, Segment.TORCH_RESERVED_UNUSED})
"""What an allocator holds unused, and gives back or uses again in the end."""
MIN_EXHAUSTION_S, MAX_SPEED = 30.0, 8.0
"""The range in which speed is evidence: a restart takes half a minute, and e to the 8 is 3,000."""
MAX_COLLECTIONS, MAX_OLDER, MAX_YOUNGER = 4, 1.5, 2.0
"""Beyond these, more of the same is no more evidence."""
CERTAIN = 50.0


class Explanation(StrEnum):
    """What a growth may be that is no leak."""

    FLUCTUATION = "a fluctuation"
    FILLING = "warm-up or a cache that still fills"
    LATER_WORK = "temporary work that started later"
    LOAD = "rising load"
    RETAINED = "memory that an allocator retains"
    GARBAGE = "garbage that is not collected yet"


@dataclass(frozen=True, slots=True)
class Weights:
    """Logarithms of odds. Those of the first line hold for each explanation.

    ``size`` is for a whole budget, ``speed`` for each factor of e by which the budget would be
    spent before its window ends. The others are what an explanation starts with, and after it what
    the evidence about it is worth: a rise that is e times as large as its deviation, a later half
    that brought an e-th less, and so on.
    """

    size: float
    speed: float
    fluctuation: float
    clearness: float
    filling: float
    fading: float
    outgrown: float
    later_work: float
    younger: float
    load: float
    climb: float
    retained: float
    garbage: float
    collection: float


WEIGHTS = Weights(
    size=1.709, speed=0.809,
    fluctuation=1.232, clearness=8.021,
    filling=0.979, fading=0.465, outgrown=2.043,
    later_work=11.922, younger=6.24,
    load=2.849, climb=6.879,
    retained=1.713,
    garbage=5.111, collection=8.253,
)  # fmt: skip
"""Fitted on a sixth of the development split and of the six splits that were seen."""


@dataclass(frozen=True, slots=True)
class Look:
    """One trend in the light of its budget.

    ``size`` is the share of the budget that the growth takes, ``speed`` the logarithm of the window
    as a multiple of the time that is left, and ``life`` that of the growth as a multiple of what
    its present pace makes in the engine's life: 0 for a steady leak, less for what began later.
    """

    trend: Trend
    size: float
    speed: float
    life: float
    segment: Segment | None


@dataclass(frozen=True, slots=True)
class Odds:
    """``log_odds`` of a leak, and of it against each explanation alone."""

    log_odds: float
    against: dict[Explanation, float]

    @property
    def chance(self) -> float:
        """The probability of a leak, from 0 to 1."""
        return 1.0 / (1.0 + math.exp(-self.log_odds))

    @property
    def otherwise(self) -> tuple[Explanation, float]:
        """The likeliest explanation that is no leak, and its probability."""
        likeliest = min(self.against, key=lambda one: self.against[one])
        return likeliest, self.chance * math.exp(-self.against[likeliest])


def speed(exhaustion_s: float | None, window_s: float) -> float:
    """Return the evidence of the time that is left; 0 where the budget lasts for its window."""
    if exhaustion_s is None or window_s <= 0:
        return 0.0
    times = math.log(window_s / max(MIN_EXHAUSTION_S, exhaustion_s))
    return min(MAX_SPEED, max(0.0, times))


def life(explained: float) -> float:
    """Return the evidence of a growth's age: it makes ``explained`` of the engine's life.

    Its range is that of a factor of 50.
    """
    return math.log(min(50.0, max(0.02, explained)))


def odds(look: Look, weights: Weights = WEIGHTS) -> Odds:
    """Return the odds of a leak behind one trend."""
    w, trend = weights, look.trend
    common = w.size * look.size + w.speed * look.speed
    fading = min(0.0, trend.fading)
    against = {
        Explanation.FLUCTUATION: w.fluctuation + w.clearness * trend.clearness,
        Explanation.FILLING: (
            w.filling + w.fading * fading - w.outgrown * min(MAX_OLDER, max(0.0, look.life))
        ),
        Explanation.LATER_WORK: w.later_work + w.younger * max(-MAX_YOUNGER, min(0.0, look.life)),
        Explanation.LOAD: w.load - w.climb * max(0.0, trend.climb),
    }
    if look.segment in REUSABLE:
        against[Explanation.RETAINED] = w.retained
    if trend.collections is not None:
        outlasted = min(MAX_COLLECTIONS, trend.collections)
        against[Explanation.GARBAGE] = w.garbage + w.collection * outlasted
    # Beyond this, odds are certainty, and their exponential would be no number.
    against = {one: max(-CERTAIN, min(CERTAIN, value + common)) for one, value in against.items()}
    return Odds(-math.log(sum(math.exp(-value) for value in against.values())), against)
