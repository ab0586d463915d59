"""A suspicion, from its first trend to its end, and from when on it is believed to be a leak.

A growth is believed at a share of its budget that depends on what else it may be: each of the other
explanations is a mechanism of healthy engines that looks like a leak for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_api.assessment import BudgetState, Segment
from plimsoll_sidecar.detect.leak.odds import REUSABLE, Look, life, speed
from plimsoll_sidecar.detect.leak.thresholds import THRESHOLDS
from plimsoll_sidecar.detect.leak.trend import Point, Trend

CLEAR_SPANS = 3.0
"""A suspicion ends when no trend was seen for so many of its spans, or half of it has come back."""


class Hysteresis:
    """One suspicion of growth.

    ``trend`` is the newest sound one, ``begun`` the growth in bytes that raised the suspicion,
    ``begun_smooth`` its average over the last minute, and ``rounds`` the full collections since
    then, None where they are not counted.
    """

    def __init__(self, trend: Trend, point: Point, smooth: float, growth: int) -> None:
        self.trend = trend
        self.since = point.t - trend.span_s
        self.begun, self.begun_smooth, self._peak = growth, smooth, smooth
        self._seen_at = self.looked_at = point.t
        self.rounds = None if point.collections is None else 0
        self._collections = point.collections

    def stands(self, point: Point, sound: Trend | None, smooth: float) -> bool:
        """Take in a sample, its trend if that is sound, and the growth of the last minute."""
        self._count_collections(point)
        if sound is not None:
            self.trend, self._seen_at = sound, point.t
            self._peak = max(self._peak, smooth)
        elif point.load == 0:
            # An idle engine cannot show that a leak driven by requests has ended.
            self._seen_at += point.t - self.looked_at
        self.looked_at = point.t
        seen = point.t - self._seen_at <= CLEAR_SPANS * self.trend.span_s
        return seen and smooth >= self._peak / 2

    def _count_collections(self, point: Point) -> None:
        """One that is unknown counts for none."""
        if point.collections is None or self._collections is None:
            self._collections = point.collections
        elif point.collections > self._collections:
            self.rounds = (self.rounds or 0) + point.collections - self._collections
            self._collections = point.collections


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
    at, trend, rounds = THRESHOLDS, suspected.trend, suspected.rounds
    held_ratio = now.held * now.ratio
    if held_ratio >= at.certain_share or not (now.lasts(at.urgent_s) or now.in_long_step):
        return None
    if rounds is not None and rounds < at.collections:
        return f"may be garbage, until {at.collections} full collections passed ({rounds} so far)"
    slow = rounds is not None and trend.span_s >= at.slow_s
    needed = at.outlasting * suspected.begun_smooth if slow else at.doubled * suspected.begun
    if now.held * now.growth < needed or now.segment in REUSABLE:
        return "may be memory that an allocator retains, unless the growth continues"
    if trend.busier:
        return "may be caused by rising load, unless the growth continues"
    lived = now.life(trend)
    if lived < 1 / 2:  # a defect leaks from the begin; most of what begins later is work that ends
        return "may be temporary work that started later, unless the growth continues"
    enough = at.fading_share if trend.fades or lived > 2 else at.confirmed_share
    grows = now.state.bytes_per_s is not None
    if (grows and held_ratio >= enough) or _straight(now, trend):
        return None
    return "may be warm-up or a cache that still fills, unless the growth continues"


def _straight(now: Standing, trend: Trend) -> bool:
    """Whether the trend is too straight to end soon, and too steep for the budget."""
    at = THRESHOLDS
    clean = trend.confidence >= at.straight_tau and trend.rise >= at.straight_factor * trend.noise
    steep = trend.span_s >= at.slow_s and not now.lasts(now.window_s)
    return clean and steep and now.ratio >= at.early_share
