"""How leaks grow, and were seen, by the share of their time; as in ``shapes``."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from leaklab.series import Curve

TURNS = 12
"""Of a client that comes and goes, until one is reached."""


def _as_a_telegraph(seed: int) -> Curve:
    """One client alone makes it leak, and comes and goes as it likes: at a level rate while it is
    there and not at all else, the same again after one is reached."""
    rng = random.Random(seed)
    spans = [rng.expovariate(1.0) + 0.05 for _ in range(2 * TURNS)]
    edges = list(accumulate(spans, initial=0.0))
    grown = list(accumulate((spans[2 * turn] for turn in range(TURNS)), initial=0.0))

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        at = part * edges[-1]
        turn, off = divmod(bisect_right(edges, at) - 1, 2)
        done = grown[turn + 1] if off else grown[turn] + at - edges[2 * turn]
        return whole + done / grown[-1]

    return curve


def _settling(seed: int) -> Curve:
    """Each kind of request leaks once more than later, when it is met first: quick at the begin,
    and at a lower rate, which lasts, once all kinds are known."""
    rng = random.Random(seed)
    first, tau = rng.uniform(0.2, 0.6), rng.uniform(0.05, 0.25)
    whole = -math.expm1(-1 / tau)
    return lambda x: (1 - first) * x - first * math.expm1(-x / tau) / whole


def _in_humps(seed: int) -> Curve:
    """It leaks as people work: a forenoon, a lunch and an afternoon for each of one to three days,
    and hardly anything by night."""
    rng = random.Random(seed)
    days, phase, night = rng.randint(1, 3), rng.random(), rng.uniform(0.04, 0.15)
    steps = 600

    def rate(x: float) -> float:
        hour = 24 * ((days * x + phase) % 1)
        return night + math.exp(-(((hour - 10) / 2) ** 2)) + math.exp(-(((hour - 15) / 2.4) ** 2))

    totals = [0.0, *accumulate(rate((step + 0.5) / steps) for step in range(steps))]

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        place = min(steps - 1, int(part * steps))
        done = totals[place] + (part * steps - place) * (totals[place + 1] - totals[place])
        return whole + done / totals[-1]

    return curve


def _by_jobs(seed: int) -> Curve:
    """Jobs come by a timetable and are unequally large: each leaks at its own rate until it is
    done, which takes a fifth to four fifths of the time to the next."""
    rng = random.Random(seed)
    count = rng.randint(7, 13)
    lasts = [rng.uniform(0.2, 0.8) for _ in range(count)]
    totals = [0.0, *accumulate(rng.lognormvariate(0, 0.6) for _ in range(count))]

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        job, within = divmod(part * count, 1.0)
        place = min(count - 1, int(job))
        done = min(1.0, within / lasts[place])
        return whole + (totals[place] + done * (totals[place + 1] - totals[place])) / totals[-1]

    return curve


def _compounding(seed: int) -> Curve:
    """What has leaked slows its engine, so that more is tried again and leaks: the rate grows with
    what is there already, twice to eight times as high at one as at nought."""
    power = random.Random(seed).uniform(math.log(2), math.log(8))
    return lambda x: math.expm1(power * x) / math.expm1(power)


SHARES: dict[str, Callable[[int], Curve]] = {
    "telegraph": _as_a_telegraph,
    "settling": _settling,
    "humps": _in_humps,
    "jobs": _by_jobs,
    "compounding": _compounding,
}
