"""Thresholds that decide whether growth is suspected, and whether it is confirmed as a leak.

They were chosen on the recordings of real engines that may be looked at, and on the splits of the
leak lab that were seen, unless a source is named. ``python -m bench.sensitivity`` varies each of
them. The weights of the evidence are fitted: ``odds.WEIGHTS``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares of the leak budget and times in seconds, unless stated otherwise."""

    early_share: float = 0.06
    """Minimum share for suspecting growth that would exhaust its budget soon or has lasted long:
    31 MiB of 512 MiB. The trend itself must have contributed half of it."""
    suspect_share: float = 0.25
    """Minimum share for suspecting any other growth."""
    soon_s: float = 150.0
    """A budget that would be exhausted within this time is exhausted soon: drain, restart and
    warm-up of an engine take minutes."""
    slow_s: float = 1200.0
    """A trend that has lasted for this long is slow. It is suspected from ``early_share`` on if the
    budget would not last for its window."""
    tau: float = 0.8
    """Minimum Kendall's tau of a trend. Two equal steps reach 0.70 and three 0.79. With 8 points, a
    chance trend has a probability below 1 % (Kendall's test, z 2.8)."""
    odds: float = 36.0
    """Odds of a leak that confirm it ``odds_left_s`` before the budget is exhausted. They rise and
    fall with the time left: 1,728 to 1 with a day, and even with 50 s or less. Of the 40 leaks of
    the recordings that may be looked at, 55 miss one, and fewer add false confirmations."""
    odds_left_s: float = 1800.0
    """Half an hour: the time in which an on-call engineer can respond."""
    noise: float = 2.0
    """A budget is exhausted if the growth exceeds it by this multiple of the trend's noise: memory
    just below its budget sometimes exceeds it by chance."""


THRESHOLDS = Thresholds()
