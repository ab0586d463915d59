"""How runs of later editions are watched, and what engines differ in: alike for healthy and leaking
ones, so that neither the interval of a run nor the habits of its engine tell what it is."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from leaklab.series import HOUR, MIB, Series

LONGEST = 72 * HOUR
"""Of a healthy run, and of one whose mechanism takes seconds."""
BRIEF = 8 * HOUR
HOURS = (
    (LONGEST, 30.0),
    (1.2 * HOUR, 1.0),
    (LONGEST, 30.0),
    (6 * HOUR, 5.0),
    (LONGEST, 30.0),
    (20 * HOUR, 20.0),
    (LONGEST, 30.0),
    (2.4 * HOUR, 2.0),
    (LONGEST, 30.0),
    (10 * HOUR, 10.0),
    (LONGEST, 30.0),
    (20 * HOUR, 20.0),
)
"""Durations and intervals of healthy runs, in turn."""
MOMENTS = (
    (HOUR, 1.0),
    (5 * HOUR, 5.0),
    (2 * HOUR, 2.0),
    (BRIEF, 10.0),
    (HOUR, 1.0),
    (3 * HOUR, 3.0),
)
"""The same where what happens takes seconds."""
INTERVALS = {
    "fast": (1.0, 2.0),
    "brisk": (5.0, 1.0, 2.0, 10.0),
    "minutes": (10.0, 1.0, 30.0, 5.0, 20.0),
    "hours": (30.0, 10.0, 5.0, 30.0, 20.0),
    "slow": (30.0, 20.0, 30.0),
}
"""Of leaking runs, by name of the rate."""
HANGS_S = (1.0, 5.0, 2.0, 3.0, 1.0)
"""Intervals of the runs that hang."""


def viewed(series: Series, number: int) -> Series:
    """The same healthy engine, watched in the way whose turn it is."""
    views = HOURS if series.duration > HOUR else MOMENTS
    duration, interval = views[number % len(views)]
    return replace(series, duration=duration, interval=interval)


def interval_of(rate: str, seed: int) -> float:
    return INTERVALS[rate][seed % len(INTERVALS[rate])]


def habits(seed: int) -> dict[str, Any]:
    """What engines differ in: what a request holds and how long it takes, how unsteady memory is
    and how slowly it wanders, how often garbage is collected. The load of one in four is read from
    a page of metrics, the processor time of each second one is known, and so is the page cache of
    one in three, which fills as files are read."""
    rng = random.Random(f"habits/{seed}")
    found: dict[str, Any] = {
        "noise": rng.uniform(8, 42) * MIB,
        "per_request": rng.uniform(0.8, 3.5) * MIB,
        "requests_per_s": rng.uniform(2, 9),
        "wander_s": math.exp(rng.uniform(math.log(8), math.log(240))),
        "collects": rng.uniform(150, 1800),
    }
    if rng.random() < 0.25:
        found["read_every"] = rng.choice((2.0, 5.0, 10.0))
    if rng.random() < 0.5:
        cores, turn = rng.uniform(0.3, 2.5), rng.uniform(300, 4000)
        found["cpu_s"] = lambda t: cores * (t - 0.15 * turn * math.sin(t / turn))
    if rng.random() < 1 / 3:
        size, tau = rng.uniform(80, 300) * MIB, rng.uniform(600, 6 * HOUR)
        found["file"] = lambda t: size * (1 - math.exp(-t / tau))
    return found


def begins(seed: int, spent: float, late: bool) -> float:
    """When a leak begins that spends its budget in that time: soon, or after a long healthy run."""
    rng = random.Random(f"begins/{seed}")
    soon = rng.uniform(180, 900) + rng.uniform(0, 0.25) * spent
    return soon + rng.uniform(1.2, 2.2) * max(spent, 600.0) if late else soon
