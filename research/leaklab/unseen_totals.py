"""How the totals of the test split's triggered leaks vary, as in ``triggered``."""

from __future__ import annotations

import math
import random

from leaklab.series import Curve

MOMENTS = 600
"""Of a run, between which a rate is level."""


def by_contagion(rate: float, length: float, rng: random.Random) -> Curve:
    """A total of which each part brings others: who has heard of something tells it. Waves rise
    from nothing, grow for as long as chance has it, and die away."""
    step, brings = length / MOMENTS, rng.uniform(0.75, 0.93)
    fades, even = math.exp(-1 / rng.uniform(3, 25)), rng.uniform(0.15, 0.4)
    excited, totals = rng.uniform(0, 2), [0.0]
    for _ in range(MOMENTS + 1):
        expected = even + excited
        come = rng.gammavariate(0.35 * expected, 1 / 0.35)
        excited = fades * excited + (1 - fades) * brings * come
        totals.append(totals[-1] + 0.1 * even + come)
    each = rate * length / totals[MOMENTS]

    def curve(t: float) -> float:
        place = min(MOMENTS, int(t / step))
        return each * (totals[place] + (t / step - place) * (totals[place + 1] - totals[place]))

    return curve
