"""The odds that a growth is a leak, against everything else that it may be, and which odds suffice.

A leak competes with four explanations. Each has weights of evidence for the leak and against it, in
natural logarithms of odds, as in a naive Bayes classifier: what it is worth at the start, and how
that changes with what is seen.

All of them lose as the growth takes more of the budget, because what is bounded ends somewhere: if
it ends at any share of the budget with equal chance, the part ``1 - s`` of it gets beyond the share
``s``, and the odds of a leak grow by ``-log(1 - s)``. They also lose as it takes the budget faster,
because healthy engines hardly ever spend a day's budget within minutes. The rest is peculiar to
each: memory that fills something up grows slower and slower, temporary work began after the engine
did, and so on. The chance of a leak follows from the sum over the explanations.

The weights are no opinions: ``python -m bench.odds_fit`` finds them by maximum likelihood on the
labelled runs of the leak lab. Each suspicion counts once there, so that the chances are those of a
suspicion (``bench/calibration.py``).

A suspicion lasts from its first trend to its end (:class:`Hysteresis`), and :func:`unconfirmed`
says from when on it is a leak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from plimsoll_api.assessment import BudgetState, Segment
from plimsoll_api.units import DAY_S
from plimsoll_sidecar.detect.growth import Point, Trend
from plimsoll_sidecar.detect.thresholds import THRESHOLDS

REUSABLE = frozenset({Segment.MALLOC_RETAINED, Segment.TORCH_RESERVED_UNUSED})
"""What an allocator holds unused, and gives back or uses again in the end."""
MIN_LEFT_S = 30.0
"""A restart takes as long: a budget that is spent sooner is no more evidence."""
MAX_SHARE = 0.98
MIN_FADING, MAX_YOUNGER = 3.0, 2.0
"""Beyond these, more of the same is no more evidence: a factor of 20, and one of 7."""
CERTAIN = 50.0


class Explanation(StrEnum):
    """What a growth may be that is no leak."""

    FILLING = "warm-up or a cache that still fills"
    LATER_WORK = "temporary work that started later"
    LOAD = "rising load"
    RETAINED = "memory that an allocator retains"


@dataclass(frozen=True, slots=True)
class Weights:
    """Logarithms of odds. Those of the first line hold for each explanation.

    ``size`` is for each factor of e by which the rest of the budget shrinks, ``speed`` for each by
    which it would be spent sooner than within a day. The others are what an explanation starts
    with, and after it what the evidence about it is worth: a later half that brought an e-th less,
    a growth that explains an e-th of the engine's life, a load that climbed all the time.
    """

    size: float
    speed: float
    filling: float
    fading: float
    later_work: float
    younger: float
    load: float
    climb: float
    retained: float


WEIGHTS = Weights(
    size=1.07, speed=0.68,
    filling=0.25, fading=1.92,
    later_work=3.93, younger=3.51,
    load=1.61, climb=5.99,
    retained=2.37,
)  # fmt: skip
"""Fitted on a quarter of the runs of the first ten splits (``bench/results/odds-fit.json``). That
of the size is near 1, which is its weight if healthy growth ends at any share with equal chance."""


@dataclass(frozen=True, slots=True)
class Look:
    """A growth in the light of its budget.

    ``share`` is what it takes of the budget, and ``left_s`` the seconds until that is spent, None
    while nothing grows. ``life`` is the growth as a multiple of what its present pace makes in the
    engine's life: 1 for a steady leak, less for what began later. ``fading`` is the logarithm of
    the later half of its rise as a share of the earlier one, and ``climb`` says how the load
    climbed with it (-1 to 1).
    """

    share: float
    left_s: float | None
    life: float
    fading: float
    climb: float
    segment: Segment | None

    @property
    def size(self) -> float:
        """The evidence of the share."""
        return -math.log1p(-min(MAX_SHARE, max(0.0, self.share)))

    @property
    def speed(self) -> float:
        """The evidence of the time that is left; 0 where that is a day or more."""
        left = DAY_S if self.left_s is None else self.left_s
        return math.log(DAY_S / min(DAY_S, max(MIN_LEFT_S, left)))

    @property
    def slowing(self) -> float:
        """The evidence of a pace that fades: 0 where it does not, or negative."""
        return max(-MIN_FADING, min(0.0, self.fading))

    @property
    def younger(self) -> float:
        """The evidence of a growth that began after the engine's life did: 0, or negative."""
        return max(-MAX_YOUNGER, min(0.0, math.log(max(1e-9, self.life))))


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


def odds(look: Look, weights: Weights = WEIGHTS) -> Odds:
    """Return the odds of a leak behind a growth."""
    w = weights
    common = w.size * look.size + w.speed * look.speed
    against = {
        Explanation.FILLING: w.filling + w.fading * look.slowing,
        Explanation.LATER_WORK: w.later_work + w.younger * look.younger,
        Explanation.LOAD: w.load - w.climb * max(0.0, look.climb),
    }
    if look.segment in REUSABLE:
        against[Explanation.RETAINED] = w.retained
    # Beyond this, odds are certainty, and their exponential would be no number.
    against = {one: max(-CERTAIN, min(CERTAIN, value + common)) for one, value in against.items()}
    return Odds(-math.log(sum(math.exp(-value) for value in against.values())), against)


def demanded(left_s: float) -> float:
    """Return the logarithm of the odds from which a growth is confirmed, ``left_s`` before its end.

    To wait costs little while the budget lasts for long, and shows more: most of what only looks
    like a leak ends before it has spent its budget. So the odds rise with the time that is left, as
    the threshold of a sequential test rises with the cost of a false alarm over that of waiting
    (Wald 1945).
    """
    at = THRESHOLDS
    return math.log(at.odds) + at.patience * math.log(max(1.0, left_s) / at.odds_left_s)


CLEAR_SPANS = 3.0
"""A suspicion ends when no trend was seen for so many of its spans, or half of it has come back."""


class Hysteresis:
    """One suspicion of growth: ``trend`` is the newest, ``since`` when the first began."""

    def __init__(self, trend: Trend, point: Point, smooth: float) -> None:
        self.trend = trend
        self.since = point.t - trend.span_s
        self._peak = smooth
        self._seen_at = self._looked_at = point.t

    def stands(self, point: Point, trend: Trend | None, smooth: float) -> bool:
        """Take in a sample, the trend that there is now, and the growth of the last minute."""
        if trend is not None:
            self.trend, self._seen_at = trend, point.t
            self._peak = max(self._peak, smooth)
        elif point.load == 0:
            # An idle engine cannot show that a leak driven by requests has ended.
            self._seen_at += point.t - self._looked_at
        self._looked_at = point.t
        seen = point.t - self._seen_at <= CLEAR_SPANS * self.trend.span_s
        return seen and smooth >= self._peak / 2

    def wait(self, point: Point) -> None:
        """Take in a sample that says nothing of growth."""
        self._seen_at += point.t - self._looked_at
        self._looked_at = point.t


@dataclass(frozen=True, slots=True)
class Standing:
    """Growth as it stands now, with the ``trend`` that raised the suspicion of it last.

    ``window_s`` is the budget's, ``lived_s`` the time since the engine was warm, ``segment`` the
    memory that grew most, and ``in_long_step`` says that one step of the engine takes unusually
    long.
    """

    state: BudgetState
    trend: Trend
    window_s: float
    lived_s: float
    segment: Segment | None
    in_long_step: bool

    @property
    def share(self) -> float:
        """What is spent of the budget."""
        return self.state.consumed_ratio or 0.0

    @property
    def spent(self) -> bool:
        """Whether the budget is spent beyond chance."""
        growth = max(1, self.state.unexplained or 0)
        return self.share * (1 - THRESHOLDS.noise * self.trend.noise / growth) >= 1.0

    @property
    def life(self) -> float:
        """The growth as a multiple of what the trend's pace makes in the engine's life."""
        growth = max(1, self.state.unexplained or 0)
        return growth / max(1.0, self.trend.bytes_per_s * self.lived_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until the budget is spent, None while nothing grows.

        What one long step needs for itself is no growth yet, however fast it goes.
        """
        return None if self.in_long_step else self.state.exhaustion_s

    def look(self) -> Look:
        """Return what the odds of a leak depend on."""
        trend = self.trend
        return Look(self.share, self.left_s, self.life, trend.fading, trend.climb, self.segment)


def unconfirmed(now: Standing, likely: Odds) -> str | None:
    """Return what the growth may be other than a leak. None when it is confirmed."""
    left = now.left_s
    if now.share >= THRESHOLDS.certain_share:
        return None
    if left is not None and likely.log_odds >= demanded(min(left, now.window_s)):
        return None
    if _straight(now):
        return None
    return f"may be {likely.otherwise[0]}, unless the growth continues"


def _straight(now: Standing) -> bool:
    """Whether the trend is too straight to end soon, and too steep for the budget."""
    at, trend, exhaustion = THRESHOLDS, now.trend, now.state.exhaustion_s
    straight = trend.span_s >= at.straight_s and trend.rise >= at.straight_factor * trend.noise
    steep = exhaustion is not None and exhaustion <= now.window_s and now.share >= at.early_share
    ends = now.life < at.begun_late or now.segment in REUSABLE
    return straight and steep and trend.climb < at.busier and not ends
