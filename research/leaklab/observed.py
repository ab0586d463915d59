"""Healthy runs whose height has an origin: a budget of three times what one earlier day showed.

A mechanism is worked out twice in a unit of its own: for the day that was observed, and for the
days of the run. Both are days of the same engine, which starts with them; what happens in them is
drawn apart. The height is then such that the budget is three times the observed level, without the
noise and what requests hold. So a run shows less than the observed day, or more: its traffic has
grown, or the mechanism takes longer than a day to reach its bound. It may also spend its budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from leaklab.days import MINUTE, Days
from leaklab.demand import between_steps
from leaklab.healthy_runs import levels, long
from leaklab.heights import BUDGET, any_height
from leaklab.origins import TIMES_LEVEL, Origin, origin_of
from leaklab.series import DAY, Build, Curve, Series
from leaklab.views import LONGEST, habits
from plimsoll_api.assessment import DEVICE_SEGMENTS

MOST = 0.96
"""The most of its budget that a run holds whose budget was set without a look."""
TRIES = 60
"""Until an engine is drawn that holds anything."""


@dataclass(frozen=True)
class Held:
    """Memory in a mechanism's own unit, and the least and the most of it over its days."""

    curve: Curve
    least: float
    most: float

    @property
    def range(self) -> float:
        return self.most - self.least


def by_minute(points: list[float]) -> Held:
    """What was held at each of the minutes, with straight lines between them."""
    return Held(between_steps(points, MINUTE), min(points), max(points))


def by_change(days: Days, changes: list[tuple[float, float]]) -> Held:
    """The sum of all changes so far, each a time and by how much."""
    before = sum(by for at, by in changes if at <= 0)
    within = sorted((at, by) for at, by in changes if 0 < at < days.until)
    totals = list(accumulate((by for _, by in within), initial=before))
    return Held(levels([(0.0, before), *within]), min(totals), max(totals))


@dataclass(frozen=True)
class Shown:
    """What a mechanism shows in some days: what it holds, how many requests are in flight at each
    of the minutes, and further totals of the engine's load."""

    held: Held
    asked: list[float]
    counters: Mapping[str, Curve] = field(default_factory=dict)


Mechanism = Callable[[random.Random, Days], Shown]
"""The generator tells engines apart, and is the same for the observed day and for the run."""


def _shown(mechanism: Mechanism, drawn: str, days: Days) -> Shown:
    return mechanism(random.Random(f"engine/{drawn}"), days)


def observed_range(mechanism: Mechanism, drawn: str) -> float:
    """What the mechanism gained from the lowest to the highest point of one earlier day."""
    return _shown(mechanism, drawn, Days(f"{drawn}/observed", DAY)).held.range


def at_height(mechanism: Mechanism, seed: int) -> tuple[Shown, float]:
    """The days of the run, and the bytes of a unit. RuntimeError if no engine of this kind ever
    holds anything."""
    for attempt in range(TRIES):
        drawn = f"{seed}/{attempt}"
        shown = _shown(mechanism, drawn, Days(f"{drawn}/run", LONGEST, later=True))
        if shown.held.range <= 0:
            continue
        if origin_of(seed) is Origin.UNOBSERVED:
            return shown, any_height(random.Random(seed), MOST) / shown.held.range
        level = observed_range(mechanism, drawn)
        if level > 0:
            return shown, BUDGET / TIMES_LEVEL / level
    raise RuntimeError(f"{mechanism.__name__}: none of {TRIES} engines holds anything")


def family(mechanism: Mechanism, segment: str, **settings: Any) -> Build:
    """Runs of engines with that mechanism, whose memory is where ``segment`` says; ``settings`` are
    further ones of their series."""

    def build(seed: int) -> Series:
        shown, unit = at_height(mechanism, seed)
        held = shown.held

        def memory(t: float) -> float:
            return unit * (held.curve(t) - held.least)

        where: dict[str, Any] = {"other": memory, "other_in": segment}
        if segment in DEVICE_SEGMENTS:
            where = {"device": True, "device_other": memory, "device_other_in": segment}
        own = habits(seed) | settings | where | {"counters": dict(shown.counters)}
        return long(seed, **own, load=between_steps(shown.asked, MINUTE))

    return build


def daily_height(seed: int) -> float:
    """Bytes, for what comes to about the same height each day: a third of a budget where a day was
    observed, a little more or less than in that day, and any height otherwise."""
    rng = random.Random(f"height/{seed}")
    if origin_of(seed) is Origin.UNOBSERVED:
        return any_height(rng, MOST)
    return BUDGET / TIMES_LEVEL * rng.uniform(0.6, 1.3)
