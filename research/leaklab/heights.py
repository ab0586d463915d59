"""How high healthy memory goes: hardly any of a leak budget, nearly all of it, or what is between.

What a mechanism does is worked out in a unit of its own, and brought to its height afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import accumulate

from leaklab.demand import between_steps
from leaklab.healthy_runs import levels
from leaklab.series import MIB, Curve
from leaklab.views import LONGEST

BUDGET = 512 * MIB
MINUTE = 60.0
MINUTES = tuple(MINUTE * number for number in range(int(LONGEST / MINUTE) + 1))
"""The times of a run at which a mechanism is worked out that is not quick."""


def any_height(rng: random.Random, most: float = 0.96) -> float:
    """Bytes: at most that share of a budget, and 3 % of it or more."""
    return BUDGET * (0.03 + (most - 0.03) * rng.betavariate(0.9, 1.1))


def by_minutes(points: Iterable[float], height: float) -> Curve:
    """What was held at each of :data:`MINUTES`, in any unit; the most is the height."""
    held = list(points)
    unit = height / max(held)
    return between_steps([unit * point for point in held], MINUTE)


def by_changes(changes: list[tuple[float, float]], height: float) -> Curve:
    """The sum of all changes so far, in any unit, each with its time; the most is the height."""
    most = max(accumulate(by for _, by in sorted(changes)))
    return levels([(at, by * height / most) for at, by in changes])
