"""A counter of growth out of a gauge that is noisy and starts anew with each epoch.

Burn rates need a counter: ``increase()`` over any range, across restarts. Summing every rise of a
noisy gauge would count its noise for ever, so a rise counts only above the level that was reached,
and that level follows the gauge down no closer than ``band`` (a dead band, as in a thermostat).
"""

from __future__ import annotations

MIN_BAND_BYTES = 2 << 20
BAND_RATIO = 0.01


def band_of(budget_bytes: int | None) -> int:
    """Return the dead band for a budget: noise below a hundredth of it is nobody's concern."""
    return max(MIN_BAND_BYTES, int(BAND_RATIO * (budget_bytes or 0)))


class Ratchet:
    """``rise`` returns how much to add to the counter, never less than zero."""

    def __init__(self) -> None:
        self._level: int | None = None
        self._epoch: int | None = None

    def rise(self, growth: int, epoch: int, band: int) -> int:
        """``growth`` bytes since the baseline of ``epoch``.

        The first value that is ever seen may be an older supervisor's: it counts as the level.
        """
        if self._level is None:
            self._level = growth
        elif epoch != self._epoch:
            self._level = 0  # a new baseline, measured from the new epoch's warm-up
        self._epoch = epoch
        risen = max(0, growth - self._level)
        self._level = min(self._level + risen, growth + band)
        return risen
