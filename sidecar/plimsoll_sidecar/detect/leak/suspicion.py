"""A suspicion, from its first trend to its end, and from when on it is believed to be a leak.

To wait costs little while the budget lasts for long, and shows more: most of what only looks like a
leak ends before it has spent its budget. So the share of the budget that growth must have taken
rises with the logarithm of the time that is left, as the threshold of a sequential test rises with
the cost of a false alarm over that of waiting (Wald 1945).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plimsoll_api.assessment import BudgetState, Segment
from plimsoll_sidecar.detect.leak.odds import REUSABLE, Look, life, speed
from plimsoll_sidecar.detect.leak.thresholds import THRESHOLDS
from plimsoll_sidecar.detect.leak.trend import Point, Trend

CLEAR_SPANS = 3.0
"""A suspicion ends when no trend was seen for so many of its spans, or half of it has come back."""


class Hysteresis:
    """One suspicion of growth.

    ``trend`` is the newest sound one, ``since`` when the first began, and ``begun`` the growth in
    bytes that raised the suspicion.
    """

    def __init__(self, trend: Trend, point: Point, smooth: float, growth: int) -> None:
        self.trend, self.begun = trend, growth
        self.since = point.t - trend.span_s
        self._peak = smooth
        self._seen_at = self._looked_at = point.t

    def stands(self, point: Point, sound: Trend | None, smooth: float) -> bool:
        """Take in a sample, its trend if that is sound, and the growth of the last minute."""
        if sound is not None:
            self.trend, self._seen_at = sound, point.t
            self._peak = max(self._peak, smooth)
        elif point.load == 0:
            # An idle engine cannot show that a leak driven by requests has ended.
            self._seen_at += point.t - self._looked_at
        self._looked_at = point.t
        seen = point.t - self._seen_at <= CLEAR_SPANS * self.trend.span_s
        return seen and smooth >= self._peak / 2


@dataclass(frozen=True, slots=True)
class Standing:
    """Growth as it stands now.

    ``window_s`` is the budget's, ``smooth`` the growth in bytes averaged over the last minute,
    ``lived_s`` the time since the engine was warm, ``segment`` the memory that grew most, and
    ``in_long_step`` says that one step of the engine takes unusually long.
    """

    state: BudgetState
    window_s: float
    smooth: float
    lived_s: float
    segment: Segment | None
    in_long_step: bool

    @property
    def growth(self) -> int:
        """Unexplained bytes above the baseline, at least one."""
        return max(1, self.state.unexplained or 0)

    @property
    def held(self) -> float:
        """The share of the growth that the last minute held on average: a single floor is noise."""
        return min(1.0, max(0.0, self.smooth / self.growth))

    @property
    def ratio(self) -> float:
        """Share of the budget that is spent."""
        return self.state.consumed_ratio or 0.0

    def life(self, trend: Trend) -> float:
        """How much of the engine's life the growth explains at the trend's pace.

        1 for a steady leak, less for what began later or quickens, more for what gets slower.
        """
        return self.growth / max(1.0, trend.bytes_per_s * self.lived_s)

    def lasts(self, seconds: float) -> bool:
        """Whether the budget lasts for longer than ``seconds``, or for ever."""
        exhaustion = self.state.exhaustion_s
        return exhaustion is None or exhaustion > seconds

    def look(self, trend: Trend) -> Look:
        """Return the trend in the light of the budget."""
        # What one long step needs for itself is no growth yet, however fast it goes.
        left = None if self.in_long_step else self.state.exhaustion_s
        size, pace = self.held * self.ratio, speed(left, self.window_s)
        return Look(trend, size, pace, life(self.life(trend)), self.segment)


def unconfirmed(now: Standing, suspected: Hysteresis) -> str | None:
    """Return what else the growth may be. None when it is believed, or when there is no time."""
    at = THRESHOLDS
    if now.ratio >= at.certain_share or not (now.lasts(at.urgent_s) or now.in_long_step):
        return None
    alternatives = _alternatives(now, suspected)
    grows = now.state.bytes_per_s is not None
    if grows and now.ratio >= needed_share(now, len(alternatives)):
        return None
    if not alternatives and _straight(now, suspected.trend):
        return None
    likeliest = alternatives[0] if alternatives else "warm-up or a cache that still fills"
    return f"may be {likeliest}, unless the growth continues"


def needed_share(now: Standing, alternatives: int) -> float:
    """Return the share of the budget from which growth is believed, by the time that is left."""
    at, left = THRESHOLDS, now.state.exhaustion_s
    times = (now.window_s if left is None else min(left, now.window_s)) / at.urgent_s
    waits = at.share_a_decade * math.log10(max(1.0, times))
    return at.hurried_share + waits + at.share_an_alternative * alternatives


def _alternatives(now: Standing, suspected: Hysteresis) -> list[str]:
    """Return the mechanisms of healthy engines that this growth resembles."""
    at, trend, alternatives = THRESHOLDS, suspected.trend, []
    if now.segment in REUSABLE or now.growth < at.continued * suspected.begun:
        alternatives.append("memory that an allocator retains")
    if trend.busier:
        alternatives.append("caused by rising load")
    if now.life(trend) < at.begun_late:
        alternatives.append("temporary work that started later")
    return alternatives


def _straight(now: Standing, trend: Trend) -> bool:
    """Whether the trend is too straight to end soon, and too steep for the budget."""
    at = THRESHOLDS
    straight = trend.span_s >= at.straight_s and trend.rise >= at.straight_factor * trend.noise
    return straight and not now.lasts(now.window_s) and now.ratio >= at.early_share
