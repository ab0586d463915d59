"""Runs of healthy engines. A builder takes a seed and makes heights and times of its own from it.

Long runs are sampled each 30 s for two days, fast mechanisms each second for an hour; those of
later editions in the ways of ``views``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from leaklab.demand import between_steps
from leaklab.series import DAY, HOUR, MIB, Curve, Series, base_of


def long(seed: int, **changes: object) -> Series:
    values: dict[str, object] = {"duration": 2 * DAY, "interval": 30.0, "noise": 25 * MIB}
    return Series(**{**values, "base": base_of(seed), **changes, "seed": seed})  # type: ignore[arg-type]


def short(seed: int, **changes: object) -> Series:
    values: dict[str, object] = {"duration": HOUR, "interval": 1.0, "noise": 25 * MIB}
    return Series(**{**values, "base": base_of(seed), **changes, "seed": seed})  # type: ignore[arg-type]


def between(seed: int, low: float, high: float) -> float:
    return random.Random(seed).uniform(low, high)


def ledgered(
    make: Callable[..., Series], seed: int, curve: Curve, bound: float, **changes: object
) -> Series:
    """A cache that its engine accounts for, to the byte."""
    return make(seed, other=curve, ledger=curve, ledger_bound=int(bound), **changes)


STEP_S = 30.0


def summed(curve: Curve) -> Curve:
    """Its integral over two days, in steps of :data:`STEP_S`; nothing before the start."""
    totals = [0.0, *accumulate(STEP_S * curve(STEP_S * n) for n in range(int(2 * DAY / STEP_S)))]
    return lambda t: totals[max(0, int(t / STEP_S))]


def integral(curve: Curve, until: float) -> Curve:
    """Its integral until then, without steps; nothing before the start."""
    count = int(until / STEP_S) + 1
    totals = [0.0, *accumulate(STEP_S * curve(STEP_S * n) for n in range(count))]
    return between_steps(totals, STEP_S)


def wandering(rng: random.Random, tau: float) -> Curve:
    """Noise of mean nought and deviation one over two days that forgets itself in ``tau``."""
    decay = math.exp(-STEP_S / tau)
    path = [rng.gauss(0, 1)]
    while len(path) * STEP_S < 2 * DAY:
        path.append(decay * path[-1] + rng.gauss(0, 1) * math.sqrt(1 - decay * decay))
    return lambda t: path[int(t / STEP_S)]


def path(points: list[tuple[float, float]]) -> Curve:
    """Straight lines from point to point, each a time and a height; level after the last."""
    times = [at for at, _ in points]

    def curve(t: float) -> float:
        place = bisect_right(times, t) - 1
        if place + 1 >= len(points):
            return points[-1][1]
        (began, low), (until, high) = points[place], points[place + 1]
        return low + (high - low) * (t - began) / (until - began)

    return curve


def levels(changes: list[tuple[float, float]]) -> Curve:
    """The sum of all changes so far, each a time and by how much; nothing before the first."""
    changes = sorted(changes)
    times, totals = [at for at, _ in changes], [0.0, *accumulate(by for _, by in changes)]
    return lambda t: totals[bisect_right(times, t)]


def last(times: list[float], t: float) -> float:
    """The last of ``times``, which begin at nought and are in order, that has come at ``t``."""
    return times[bisect_right(times, t) - 1]


Span = tuple[float, float]
"""The least and the most of a time."""


class Spells:
    """What comes and goes at times of its own: ``apart`` from one to the next, each ``lasts``."""

    def __init__(
        self, rng: random.Random, apart: Span, lasts: Span, until: float = 2 * DAY
    ) -> None:
        self._edges = [0.0]
        while self._edges[-1] < until:
            span = apart if len(self._edges) % 2 else lasts
            self._edges.append(self._edges[-1] + rng.uniform(*span))

    def on(self, t: float) -> bool:
        return bisect_right(self._edges, t) % 2 == 0

    def since(self, t: float) -> float:
        """Seconds since the last one began or ended; at first since the start."""
        return t - last(self._edges, t)
