"""Thresholds that decide whether growth is suspected, and whether it is confirmed as a leak.

They were chosen on the training recordings of real engines and on the earlier splits of the leak
lab, unless a source is named. ``python -m bench.sensitivity`` varies each of them. The weights of
the evidence are fitted: ``odds.WEIGHTS``.
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
    odds: float = 99.0
    """Odds of a leak that confirm it ``odds_left_s`` before a budget for a day is exhausted: 99 of
    100 such decisions are right."""
    odds_left_s: float = 1800.0
    """Half an hour: the time in which an on-call engineer can respond."""
    patience: float = 0.75
    """Power of the time left with which the required odds rise: 8 to 1 with a minute, 1,800 to 1
    with a day. With 8 to 1, a leak of 400 MB a minute is confirmed after 30 s."""
    haste: float = 0.67
    """Power with which ``odds_left_s`` rises as the budget's window falls below a day. With 0, four
    of 40 real leaks against budgets for an hour were missed, and with 0.5 to 0.75 none."""
    noise: float = 2.0
    """A budget is exhausted if the growth exceeds it by this multiple of the trend's noise: memory
    just below its budget sometimes exceeds it by chance."""


THRESHOLDS = Thresholds()
