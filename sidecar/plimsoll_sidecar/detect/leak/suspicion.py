"""A suspicion, from its first trend to its end, and from when on it is believed to be a leak.

A growth is believed at a share of its budget that depends on what else it may be: each of the other
explanations is a mechanism of healthy engines that looks like a leak for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_api.assessment import BudgetState, Segment
from plimsoll_sidecar.detect.leak.odds import REUSABLE
from plimsoll_sidecar.detect.leak.trend import SLOW_SPAN_S, Point, Trend

CLEAR_SHARE = 0.5
"""A suspicion ends when this share of the growth it stood on has come back."""
CLEAR_SPANS = 3.0
"""... or when no trend was seen for so many of its spans."""
CONFIRMED_RATIO = 0.8
"""Whatever a growth may be: one that has spent this share of the budget is believed."""
CONFIRMED_FACTOR = 2.0
"""Before that it must become this multiple of what raised the suspicion: what an allocator keeps
after a burst does not."""
COLLECTION_ROUNDS = 2
"""Full collections that a growth must outlast."""
OUTLAST_FACTOR = 1.25
"""A slow trend that outlasted them is believed when it became this multiple of what it was."""
MIN_CONFIRMED_RATIO = 0.47
"""Heat after a restart, graphs that are captured late, pools that follow the load: what is bounded
and undeclared ends below this share of a budget that was set with thought."""
LIFE_SHARE = 0.5
"""A defect leaks from the begin. Growth whose present pace explains less than this share of the
engine's life began later: most of that is work which ends, such as a batch or a profile."""
CLEAN_FACTOR, CLEAN_TAU, CLEAN_SPAN_S, CLEAN_RATIO = 50.0, 0.95, 2400.0, 0.085
"""A trend that is straight for long, without noise and without steps, is believed earlier, if the
budget would not last for its window."""
MIN_FADING_RATIO, FADED = 0.65, 1.5
"""The same for growth that gets slower, within its trend or by this factor since the begin: it
fills something up."""
URGENT_S = 150.0
"""A budget that is spent sooner leaves no time for doubt."""


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
        return seen and smooth >= CLEAR_SHARE * self._peak

    def _count_collections(self, point: Point) -> None:
        """One that is unknown counts for none."""
        if point.collections is None or self._collections is None:
            self._collections = point.collections
        elif point.collections > self._collections:
            self.rounds = (self.rounds or 0) + point.collections - self._collections
            self._collections = point.collections


@dataclass(frozen=True, slots=True)
class Standing:
    """A suspected growth as it stands now.

    ``window_s`` is the budget's, ``smooth`` the growth in bytes averaged over the last minute,
    ``lived_s`` the time since the engine was warm, ``segment`` the memory that grew most, and
    ``in_long_step`` says that one step of the engine takes unusually long.
    """

    hysteresis: Hysteresis
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
        return min(1.0, self.smooth / self.growth)

    @property
    def ratio(self) -> float:
        """Share of the budget that is spent."""
        return self.state.consumed_ratio or 0.0

    @property
    def life(self) -> float:
        """How much of the engine's life the growth explains at its present pace.

        1 for a steady leak, less for what began later or quickens, more for what gets slower.
        """
        return self.growth / max(1.0, self.hysteresis.trend.bytes_per_s * self.lived_s)

    def lasts(self, seconds: float) -> bool:
        """Whether the budget lasts for longer than ``seconds``, or for ever."""
        exhaustion = self.state.exhaustion_s
        return exhaustion is None or exhaustion > seconds


def unconfirmed(now: Standing) -> str | None:
    """Return what else the growth may be. None when it is believed, or when there is no time."""
    hysteresis, trend = now.hysteresis, now.hysteresis.trend
    held_ratio = now.held * now.ratio
    # What one long step needs for itself is no growth yet, however fast it goes.
    urgent = not (now.lasts(URGENT_S) or now.in_long_step)
    if urgent or held_ratio >= CONFIRMED_RATIO:
        return None
    rounds = hysteresis.rounds
    if rounds is not None and rounds < COLLECTION_ROUNDS:
        return (
            f"may be garbage, until {COLLECTION_ROUNDS} full collections passed ({rounds} so far)"
        )
    slow = rounds is not None and trend.span_s >= SLOW_SPAN_S
    needed = (
        OUTLAST_FACTOR * hysteresis.begun_smooth if slow else CONFIRMED_FACTOR * hysteresis.begun
    )
    if now.held * now.growth < needed or now.segment in REUSABLE:
        return "may be memory that an allocator retains, unless the growth continues"
    if trend.busier:
        return "may be caused by rising load, unless the growth continues"
    if now.life < LIFE_SHARE:
        return "may be temporary work that started later, unless the growth continues"
    enough = MIN_FADING_RATIO if trend.fades or now.life > FADED else MIN_CONFIRMED_RATIO
    grows = now.state.bytes_per_s is not None
    if (grows and held_ratio >= enough) or _straight(now):
        return None
    return "may be warm-up or a cache that still fills, unless the growth continues"


def _straight(now: Standing) -> bool:
    """Whether the trend is too straight to end soon, and too steep for the budget."""
    trend = now.hysteresis.trend
    clean = trend.confidence >= CLEAN_TAU and trend.rise >= CLEAN_FACTOR * trend.noise
    lasts = now.lasts(now.window_s)
    return clean and not lasts and trend.span_s >= CLEAN_SPAN_S and now.ratio >= CLEAN_RATIO
