"""Compute the odds that growth is a leak, compared with its other possible explanations.

Each explanation has a prior and weights for the observations, in natural log-odds (naive Bayes).
``python -m bench.odds_fit`` fits them to labelled runs of the leak lab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from plimsoll_api.assessment import Segment
from plimsoll_api.units import DAY_S
from plimsoll_sidecar.detect.growth import Point, Trend
from plimsoll_sidecar.detect.thresholds import THRESHOLDS

REUSABLE_SEGMENTS = frozenset({Segment.MALLOC_RETAINED, Segment.TORCH_RESERVED_UNUSED})
"""Memory that an allocator keeps unused, and will return or use again."""
MIN_LEFT_S = 30.0
"""Minimum time to exhaustion that counts as evidence of speed: the time of a restart."""
MAX_SHARE = 0.98
"""Consumed shares of the budget above this value count as this value in the evidence."""
MAX_YOUNGER = 2.0
"""Bound for :attr:`Evidence.age_evidence`: the logarithm of about 7."""
CLEAR_SPANS = 3.0
"""Duration of a suspicion without a new trend, as a multiple of its last trend's span."""


class Explanation(StrEnum):
    """A cause of growth other than a leak."""

    FILLING = "warm-up or a cache that still fills"
    LATER_WORK = "temporary work that started later"
    LOAD = "rising load"
    RETAINED = "memory that an allocator retains"


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of evidence in natural log-odds. ``size`` and ``speed`` apply to all explanations.

    Attributes:
        size: For each factor of e by which the remaining budget shrinks.
        speed: For each factor of e by which the budget is exhausted before its window ends.
        filling, later_work, load, retained: Priors of the explanations.
        fading: For each factor of e between the earlier and the later half of the growth.
        younger: For each factor of e by which the growth is younger than the engine.
        climb: For a load that rose all the time.

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
"""Fitted on a quarter of the runs of the first ten splits, with budgets for a day
(``research/bench/results/odds-fit.json``)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations of growth, from which the odds of a leak are computed.

    Attributes:
        share: The consumed share of the budget, which applies to ``window_s`` seconds.
        left_s: The seconds until the budget is exhausted at the growth's mean pace; None while
            nothing grows.
        life: The growth, divided by what its mean pace would have added since the engine's start.
        fading, climb: As in :class:`~plimsoll_sidecar.detect.growth.Trend`.
        segment: The segment that grew most.

    """

    share: float
    left_s: float | None
    window_s: float
    life: float
    fading: float
    climb: float
    segment: Segment | None

    @property
    def size_evidence(self) -> float:
        """Evidence from the consumed share: healthy growth ends at any share with equal chance."""
        return -math.log1p(-min(MAX_SHARE, max(0.0, self.share)))

    @property
    def speed_evidence(self) -> float:
        """Evidence from the time to exhaustion, unweighted; 0 if the budget outlasts its window."""
        left = self.window_s if self.left_s is None else self.left_s
        return max(0.0, math.log(self.window_s / max(MIN_LEFT_S, left)))

    @property
    def age_evidence(self) -> float:
        """Evidence from growth that started later than the engine, unweighted: negative or 0."""
        return max(-MAX_YOUNGER, min(0.0, math.log(max(1e-9, self.life))))


@dataclass(frozen=True, slots=True)
class Odds:
    """Natural log-odds of a leak, against all explanations together and against each alone."""

    log_odds: float
    against: dict[Explanation, float]

    @property
    def probability(self) -> float:
        """Probability of a leak."""
        return 1.0 / (1.0 + math.exp(-self.log_odds))

    @property
    def likeliest_alternative(self) -> tuple[Explanation, float]:
        """Most likely explanation other than a leak, and its probability."""
        likeliest = min(self.against, key=lambda explanation: self.against[explanation])
        return likeliest, self.probability * math.exp(-self.against[likeliest])


def compute_odds(evidence: Evidence) -> Odds:
    """Return the odds that growth with this ``evidence`` is a leak."""
    w = WEIGHTS
    common = w.size * evidence.size_evidence + w.speed * evidence.speed_evidence
    against = {
        Explanation.FILLING: w.filling + w.fading * evidence.fading,
        Explanation.LATER_WORK: w.later_work + w.younger * evidence.age_evidence,
        Explanation.LOAD: w.load - w.climb * max(0.0, evidence.climb),
    }
    if evidence.segment in REUSABLE_SEGMENTS:
        against[Explanation.RETAINED] = w.retained
    against = {explanation: value + common for explanation, value in against.items()}
    return Odds(-math.log(sum(math.exp(-value) for value in against.values())), against)


def compute_required_log_odds(remaining_s: float, window_s: float) -> float:
    """Return the log-odds, at least 0, that confirm a leak ``remaining_s`` before exhaustion.

    They rise with the remaining time, as a sequential test's threshold rises with the cost of a
    false alarm relative to that of waiting (Wald 1945).
    """
    at = THRESHOLDS
    reference_s = at.odds_left_s * (DAY_S / window_s) ** at.haste
    remaining_s = min(max(1.0, remaining_s), window_s)
    return max(0.0, math.log(at.odds) + at.patience * math.log(remaining_s / reference_s))


def is_confirmed(evidence: Evidence, posterior: Odds) -> bool:
    """Report whether the evidence suffices to confirm a leak."""
    left = evidence.left_s
    if left is None:
        return False
    return posterior.log_odds >= compute_required_log_odds(left, evidence.window_s)


class SuspectedGrowth:
    """Suspected growth, from its first trend (``since``) to its end; ``trend`` is the newest."""

    def __init__(self, trend: Trend, point: Point, growth: float) -> None:
        self.trend = trend
        self.since = point.t - trend.span_s
        self._peak = growth
        self._trend_at = point.t

    def update(self, point: Point, trend: Trend | None, growth: float) -> bool:
        """Add a sample, and return whether the growth (in bytes) is still suspected.

        ``trend`` is None if no trend is large enough for a suspicion.
        """
        if trend is not None:
            self.trend, self._trend_at = trend, point.t
            self._peak = max(self._peak, growth)
        recent = point.t - self._trend_at <= CLEAR_SPANS * self.trend.span_s
        return recent and growth >= self._peak / 2
