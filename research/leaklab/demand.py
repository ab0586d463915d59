"""How many requests are in flight over time: patterns that healthy and leaking engines share."""

from __future__ import annotations

import math
import random
from bisect import bisect_right

from leaklab.series import HOUR, Curve
from leaklab.views import LONGEST


def between_steps(points: list[float], step: float) -> Curve:
    """Straight lines between points that are ``step`` apart; level beyond the last."""

    def curve(t: float) -> float:
        place = min(len(points) - 2, max(0, int(t / step)))
        part = min(1.0, max(0.0, t / step - place))
        return points[place] + part * (points[place + 1] - points[place])

    return curve


def two_humps(low: float, high: float, phase: float = 0.0) -> Curve:
    """A forenoon and an afternoon with a lunch between them, and a night."""

    def load(t: float) -> float:
        hour = (t + phase) / HOUR % 24
        humps = math.exp(-(((hour - 10) / 2.2) ** 2)) + 0.85 * math.exp(-(((hour - 15) / 2.6) ** 2))
        return low + (high - low) * min(1.0, humps)

    return load


def rushes(
    seed: int, low: float, high: float, apart: tuple[float, float], lasts: tuple[float, float]
) -> Curve:
    """Little, with busy spells at times that cannot be predicted."""
    rng, edges = random.Random(f"rushes/{seed}"), [0.0]
    while edges[-1] < LONGEST:
        edges.append(edges[-1] + rng.uniform(*(apart if len(edges) % 2 else lasts)))
    return lambda t: low if bisect_right(edges, t) % 2 else high


def drifting(seed: int, mean: float, tau: float, spread: float = 0.4) -> Curve:
    """Its logarithm wanders about that of the mean and forgets itself in ``tau``."""
    rng = random.Random(f"drifting/{seed}")
    step = min(300.0, tau / 8)
    decay = math.exp(-step / tau)
    level, points = rng.gauss(0, 1), list[float]()
    for _ in range(int(LONGEST / step) + 2):
        points.append(mean * math.exp(spread * level - spread * spread / 2))
        level = decay * level + rng.gauss(0, 1) * math.sqrt(1 - decay * decay)
    return between_steps(points, step)


def beating(low: float, high: float, first: float, second: float) -> Curve:
    """Two rhythms of clients at once, which meet at times."""
    middle, part = (low + high) / 2, (high - low) / 4

    def load(t: float) -> float:
        return middle + part * (
            math.sin(2 * math.pi * t / first) + math.sin(2 * math.pi * t / second)
        )

    return load
