"""A suspicion, from its first trend to its end, and from when on it is confirmed to be a leak."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_api.assessment import BudgetState, Segment
from plimsoll_sidecar.detect.leak.odds import REUSABLE, Look, Odds, demanded
from plimsoll_sidecar.detect.leak.thresholds import THRESHOLDS
from plimsoll_sidecar.detect.leak.trend import Point, Trend

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
