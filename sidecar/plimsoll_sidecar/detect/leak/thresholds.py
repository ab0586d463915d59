"""The numbers that decide whether growth is suspected, and whether it is believed to be a leak.

They were chosen on the development split of the leak lab and on the test splits that were seen, but
for those whose source is named. ``python -m bench.sensitivity`` moves each of them.
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
    hurried_share: float = 0.35
    """What growth must have taken that would spend its budget within ``urgent_s``. The more time is
    left, the less it costs to wait, and the more is demanded."""
    share_a_decade: float = 0.15
    """Each tenfold of the time that is left demands so much more: .5 with 10 minutes, .65 with 100,
    .78 with half a day. What fills something up evenly has mostly ended by then."""
    share_an_alternative: float = 0.2
    """Each mechanism of healthy engines that the growth resembles demands so much more."""
    certain_share: float = 0.9
    """Whatever a growth may be, it is believed from here on."""
    urgent_s: float = 60.0
    """A budget that is spent sooner leaves no time for doubt. 400 MB a minute spend 512 MiB within
    80 s, and are to be known after 30 s."""
    continued: float = 1.5
    """What raised the suspicion must become this multiple of itself: what an allocator keeps after
    a burst does not."""
    begun_late: float = 0.5
    """Growth that explains less of the engine's life at its present pace began later. A defect
    leaks from the start; most of what begins later is work that ends."""
    slow_s: float = 1200.0
    """A trend that has lasted for so long is a slow one: it is suspected from ``early_share`` on,
    if the budget would not last for its window."""
    tau: float = 0.8
    """Kendall's tau of a trend at least. Two equal steps reach 0.70 and three 0.79. With 8 points,
    a chance trend has a probability below 1 % (Kendall's test, z 2.8)."""
    straight_s: float = 3600.0
    """The least duration of a trend that is believed from ``early_share`` on, because it is too
    straight to end soon."""
    straight_factor: float = 100.0
    """Such a trend's rise as a multiple of the median deviation from its line."""
    steady: float = 0.7
    """A slow leak keeps its pace: a later half that brings less than this share of the earlier one
    gets slower. A cache that fills with a time constant of 1.4 windows does just that."""


THRESHOLDS = Thresholds()
