"""A suspicion that stands, until what it stood on has come back or shows itself no more."""

from __future__ import annotations

from plimsoll_sidecar.detect.leak.trend import Point, Trend

CLEAR_SHARE = 0.5
"""A suspicion ends when this share of the growth it stood on has come back."""
CLEAR_SPANS, MIN_CLEAR_S = 3.0, 60.0
"""... or when no trend was seen for so many of its spans, and for this time."""


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

    @property
    def lasted_s(self) -> float:
        """Since the begin of the first trend."""
        return self.looked_at - self.since

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
        patience = max(MIN_CLEAR_S, CLEAR_SPANS * self.trend.span_s)
        return smooth >= CLEAR_SHARE * self._peak and point.t - self._seen_at <= patience

    def _count_collections(self, point: Point) -> None:
        """One that is unknown counts for none."""
        if point.collections is None or self._collections is None:
            self._collections = point.collections
        elif point.collections > self._collections:
            self.rounds = (self.rounds or 0) + point.collections - self._collections
            self._collections = point.collections
