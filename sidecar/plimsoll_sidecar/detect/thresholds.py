"""Thresholds that decide whether growth is suspected, and whether it is confirmed as a leak.

They were chosen on training recordings of real engines, and on series of the leak lab's development
split and of test splits that had been seen. A docstring names any other source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares of the leak budget and times in seconds, unless a docstring says otherwise."""

    early_share: float = 0.06
    """Minimum share of growth that would exhaust its budget soon, or has lasted long. The trend
    itself must have contributed half of it."""
    suspect_share: float = 0.25
    """Minimum share at which any other growth is suspected."""
    soon_s: float = 200.0
    """Time to exhaustion that counts as soon: drain, restart and warm-up take minutes. Chosen on
    166 recordings of real engines, as the longest that adds no false event."""
    slow_s: float = 1200.0
    """Duration from which a trend is slow, and suspected from ``early_share`` on if its budget
    would not outlast the window."""
    tau: float = 0.8
    """Minimum Kendall's tau of a trend. Two equal steps reach 0.70 and three 0.79. With 8 points, a
    chance trend has a probability below 1 % (Kendall's test, z 2.8)."""
    odds: float = 99.0
    """Odds that confirm a leak ``odds_left_s`` before a budget for a day is exhausted."""
    odds_left_s: float = 1800.0
    """Time to exhaustion at which ``odds`` apply: an on-call engineer can respond in half an
    hour."""
    patience: float = 0.75
    """Exponent of the remaining time in the required odds: 8 to 1 with a minute left, 1,800 to 1
    with a day left. With 8 to 1, a leak of 400 MB a minute is confirmed after 30 s."""
    haste: float = 0.67
    """Exponent with which ``odds_left_s`` rises as the budget's window falls below a day. With 0,
    four of 40 real leaks against budgets for an hour were missed; with 0.5 to 0.75, none."""
    noise: float = 2.0
    """Multiple of the trend's noise by which growth must exceed the budget to count as exhausted.
    Memory just below its budget sometimes exceeds it by chance."""


THRESHOLDS = Thresholds()
