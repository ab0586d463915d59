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
    confirmed_share: float = 0.47
    """Growth that keeps its pace is believed. Heat after a restart, graphs that are captured late
    and pools that follow the load end below it: what is bounded and not declared stays below half
    of a budget that was set with thought."""
    fading_share: float = 0.65
    """Growth that gets slower is believed: it fills something up, and takes more of the budget."""
    certain_share: float = 0.8
    """Whatever a growth may be, it is believed, while a fifth of the budget is left to act in."""
    urgent_s: float = 150.0
    """A budget that is spent sooner leaves no time for doubt: drain, restart and warm-up of an
    engine take minutes."""
    slow_s: float = 1200.0
    """A trend that has lasted for so long is a slow one: it has met most of what comes and goes."""
    doubled: float = 2.0
    """What raised the suspicion must become this multiple of itself: what an allocator keeps after
    a burst does not."""
    outlasting: float = 1.25
    """The same for a slow trend of an engine that counts its full collections."""
    collections: int = 2
    """Full collections that a growth must outlast: garbage of the oldest generation may survive the
    one that is under way."""
    tau: float = 0.8
    """Kendall's tau of a trend at least. Two equal steps reach 0.70 and three 0.79. With 8 points,
    a chance trend has a probability below 1 % (Kendall's test, z 2.8)."""
    straight_tau: float = 0.95
    """Tau of a trend that is too straight to end soon, and is believed from ``early_share`` on."""
    straight_factor: float = 50.0
    """Such a trend's rise as a multiple of the median deviation from its line."""
    noise_factor: float = 4.0
    """The same for any trend: what rises by less is noise."""
    steady: float = 0.7
    """A later half that brings less than this share of the earlier half gets slower. A cache that
    fills with a time constant of 1.4 windows does just that."""


THRESHOLDS = Thresholds()
