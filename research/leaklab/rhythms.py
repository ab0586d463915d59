"""How leaks grow that follow clients, jobs and the clock, by the share of their time; as in
``shapes``."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from leaklab.series import Curve

TURNS = 12
"""Of a client that comes and goes, until one is reached."""
STEPS = 600
"""Until one is reached, between which a rate that varies is level."""


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


def _of_rates(rates: list[float]) -> Curve:
    """The sum of rates that each last as long, the same again after one is reached."""
    totals, count = list(accumulate(rates, initial=0.0)), len(rates)

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        place = min(count - 1, int(part * count))
        done = totals[place] + (part * count - place) * rates[place]
        return whole + done / totals[-1]

    return curve


def _overflowing(seed: int) -> Curve:
    """It leaks only what is above a threshold, such as requests beyond the places of a pool: not at
    all for most of the time, and by very unequal amounts in the crowds between."""
    rng = random.Random(seed)
    level, rates, holds = rng.gauss(0, 1), list[float](), rng.uniform(0.85, 0.96)
    for _ in range(STEPS):
        level = holds * level + rng.gauss(0, 1) * math.sqrt(1 - holds * holds)
        rates.append(max(0.0, level - 0.3) + 0.03)
    return _of_rates(rates)


def _wandering(seed: int) -> Curve:
    """What clients do changes little by little and never goes back to what it was: the logarithm of
    the rate walks at random, between a fifth and five times of where it began."""
    rng = random.Random(seed)
    log, rates, most = 0.0, list[float](), math.log(5)
    for _ in range(STEPS):
        log = max(-most, min(most, log + rng.gauss(0, 0.09)))
        rates.append(math.exp(log))
    return _of_rates(rates)


def _after_gaps(seed: int) -> Curve:
    """Events of about one size after gaps of very unequal lengths (a power law), the same again
    after one is reached: ten in a row, and then none for long."""
    rng = random.Random(seed)
    gaps = [min(12.0, 0.3 * rng.paretovariate(1.1)) for _ in range(40)]
    times = list(accumulate(gaps))
    totals = list(accumulate((rng.uniform(0.7, 1.3) for _ in times), initial=0.0))
    last = times[-1] + 0.3

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        return whole + totals[bisect_right(times, part * last)] / totals[-1]

    return curve


def _by_the_clock(seed: int) -> Curve:
    """A timetable starts something at each full hour, and it leaks most of its share within the
    first minutes; what goes on between leaks a little, too."""
    rng = random.Random(seed)
    turns, even, tau = rng.randint(8, 24), rng.uniform(0.1, 0.4), rng.uniform(0.05, 0.2)
    whole_turn = -math.expm1(-1 / tau)

    def curve(x: float) -> float:
        turn, part = divmod(turns * x, 1.0)
        return even * x + (1 - even) * (turn - math.expm1(-part / tau) / whole_turn) / turns

    return curve


def _on_weekdays(seed: int) -> Curve:
    """It leaks as an office works: five days, each with a night, and two at which hardly anything
    comes, from any day of the week on."""
    rng = random.Random(seed)
    first, rates = rng.uniform(0, 7), list[float]()
    for step in range(STEPS):
        day = (first + 7 * step / STEPS) % 7
        works = max(0.0, math.sin(math.pi * (day % 1 - 0.25) / 0.6)) if 0.25 < day % 1 < 0.85 else 0
        rates.append(0.04 + works * (1.0 if day < 5 else 0.08))
    return _of_rates(rates)


SHARES: dict[str, Callable[[int], Curve]] = {
    "telegraph": _as_a_telegraph,
    "settling": _settling,
    "humps": _in_humps,
    "jobs": _by_jobs,
    "compounding": _compounding,
    "overflow": _overflowing,
    "walk": _wandering,
    "gaps": _after_gaps,
    "clock": _by_the_clock,
    "weekdays": _on_weekdays,
}
