"""Precog, adapted: trends of runs without a leak are learned, and a trend beyond them is a leak.

After Jindal et al., "Online Memory Leak Detection in the Cloud-based Infrastructures" (2021). A
series is cut at its change points; each piece with a good line that would reach the limit within
the critical time is a trend with a slope and a duration. Learning keeps the trends of healthy runs.
A piece of the new run is a leak when it is steeper than every learned trend that lasted as long.
The filter keeps only the greatest slope and the greatest duration of all. Adapted: their histories
are of many machines with labels, ours are the healthy runs of the development split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CHOICES = tuple((r2, hours * 3600.0) for r2 in (0.5, 0.75, 0.9) for hours in (2.0, 12.0, 48.0))
"""The least R2 of a line, and the critical time in seconds."""
CHANGE_Z = 3.0
"""A step of the smoothed series by so many standard deviations begins a new piece."""
SMOOTH = 12
LEAST_POINTS = 30
GRID_S = 10.0
LOOK_S = 60.0

_learned: dict[tuple[float, float], list[tuple[float, float]]] = {}


def learn(runs: Iterable[tuple[Array, Array, float]]) -> None:
    """The trends of healthy runs (times, sizes, limit), for each choice of the parameters."""
    _learned.clear()
    for t, x, limit in runs:
        width = max(1, round(GRID_S / (t[1] - t[0])))
        for choice in CHOICES:
            found = _learned.setdefault(choice, [])
            found += [
                trend
                for begin, end in _pieces(x[::width])
                if (trend := _trend(t[::width][begin:end], x[::width][begin:end], limit, choice))
            ]


def rule(t: Array, x: Array, limit: float, choice: tuple[float, float], filtered: bool) -> Array:
    """The times at which a trend of ``x`` goes beyond all that were learned."""
    known = np.array(_learned.get(choice) or [(0.0, 0.0)])
    if filtered:
        known = known.max(axis=0, keepdims=True)
    found = []
    every = max(1, int(LOOK_S / (t[1] - t[0])))
    for begin, end in _pieces(x):
        for now in range(begin + LEAST_POINTS, end + 1, every):
            trend = _trend(t[begin:now], x[begin:now], limit, choice)
            if trend is None:
                continue
            slope, lasted = trend
            longer = known[known[:, 1] >= lasted]
            if not (longer[:, 0] >= slope).any():
                found.append(t[now - 1])
                break
    return np.array(found)


def _pieces(x: Array) -> Iterator[tuple[int, int]]:
    """Begin and end of the pieces between change points."""
    if len(x) <= 2 * SMOOTH:
        return
    sums = np.concatenate((np.zeros(1), np.cumsum(x)))
    means = (sums[SMOOTH:] - sums[:-SMOOTH]) / SMOOTH
    jumps = means[SMOOTH:] - means[:-SMOOTH]
    spread = jumps.std() or 1.0
    at = np.flatnonzero(np.abs(jumps - jumps.mean()) > CHANGE_Z * spread) + SMOOTH
    last = 0
    for place in [*at.tolist(), len(x)]:
        if place - last >= LEAST_POINTS:
            yield last, place
        last = place


def _trend(
    t: Array, x: Array, limit: float, choice: tuple[float, float]
) -> tuple[float, float] | None:
    """Slope in bytes a second and duration in seconds; None where no line reaches the limit."""
    least_r2, critical_s = choice
    if len(t) < LEAST_POINTS:
        return None
    s, y = t - t.mean(), x - x.mean()
    slope = float(s @ y / (s @ s))
    whole = float(y @ y)
    if slope <= 0.0 or whole <= 0.0 or slope * float(s @ y) / whole < least_r2:
        return None
    if (limit - x[-1]) / slope > critical_s:
        return None
    return slope, float(t[-1] - t[0])
