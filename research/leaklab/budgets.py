"""The window and the limit of a run's budget, and healthy engines that spend it.

One healthy engine in ten takes one to three times its budget, and keeps that or gives most of it
back. The windows and the limits come in turn, so that each family has all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from leaklab.series import DAY, GIB, HOUR, NOTHING, Curve, Series

WINDOWS_S = (600.0, HOUR, DAY, 7 * DAY)
SPENDS = 0.1
"""Share of the healthy engines that spend their budget."""
LEAST, MOST = 1.0, 3.0
"""How many times they do."""
KEPT_SHARE = 0.1
"""What is left of it where an engine gives it back."""
FALLS_S = 30.0
FAR = 16 * GIB
NEAR = (0.2, 1.0)
"""Budgets between the most that a run holds and a limit that is near."""
POINTS = 500


def window_of(turn: int, least_s: float = 0.0) -> float:
    """The window in seconds whose turn it is, of those that are not shorter than ``least_s``."""
    windows = [window for window in WINDOWS_S if window >= least_s] or [WINDOWS_S[-1]]
    return windows[turn % len(windows)]


def limit_of(series: Series, budget: int, leaked: float, turn: int) -> int:
    """A limit in bytes: in turn far away, and near the most that the run holds."""
    if turn % 2 == 0:
        return FAR
    rng = random.Random(f"limit/{series.seed}")
    times = [series.duration * number / POINTS for number in range(POINTS)]
    most = max(series.other(t) + series.per_request * series.load(t) for t in times)
    room = rng.uniform(*NEAR) * budget
    return int(series.base + most + 2 * series.noise + leaked + room)


def spending(series: Series, budget: int) -> Series:
    """The healthy run, or with the chance of one in ten the same in an engine that spends it.

    A run whose memory is all declared, or all held by requests, stays as it is.
    """
    rng = random.Random(f"spends/{series.seed}")
    name = "device_other" if series.device_other is not NOTHING else "other"
    held: Curve = getattr(series, name)
    if rng.random() >= SPENDS or series.ledger is not None or held is NOTHING:
        return series
    times = [series.duration * number / POINTS for number in range(POINTS)]
    points = [held(t) for t in times]
    low, high = min(points), max(points)
    if high <= low:
        return series
    unit = rng.uniform(LEAST, MOST) * budget / (high - low)
    falls = _time_of_a_fall(times, points, rng) if rng.random() < 0.5 else series.duration

    def memory(t: float) -> float:
        kept = 1.0 - (1.0 - KEPT_SHARE) * min(1.0, max(0.0, (t - falls) / FALLS_S))
        return unit * kept * (held(t) - low)

    if name == "other":
        return replace(series, other=memory)
    return replace(series, device_other=memory)


def _time_of_a_fall(times: Sequence[float], points: Sequence[float], rng: random.Random) -> float:
    """A time after the most was held, or in the second half of the run."""
    at = min(times[points.index(max(points))], times[-1] / 2)
    return at + rng.uniform(0.05, 0.9) * (times[-1] - at)
