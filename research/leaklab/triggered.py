"""Leaks that follow one counter of the engine while all its counters vary independently.

A service's mix of work changes: images in the morning, aborts in an outage. Each counter has a rate
of its own that changes over time; the splits differ in how it does. The leak follows one of them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

from leaklab import editions
from leaklab.cases import REACHED, Case
from leaklab.editions import Edition
from leaklab.series import MIB, Curve, Series, base_of, bursty
from leaklab.splits import EDITIONS, Split
from leaklab.views import habits, interval_of
from plimsoll_sidecar.detect.attribution import COUNTER_FIELDS, TIME_TRIGGER

RATES = {
    "requests": 5.0,
    "aborts": 0.4,
    "errors": 0.05,
    "images": 1.5,
    "audios": 0.3,
    "prompt_tokens": 4000.0,
    "generated_tokens": 900.0,
    "distinct_prompts": 2.5,
    "adapters": 0.02,
}
"""Mean events a second."""
BUDGET = 512 * MIB
STARTS = 300.0
WANDERS_S = 45.0
NOISES = (8 * MIB, 25 * MIB, 40 * MIB)


def switching(rate: float, length: float, rng: random.Random) -> Curve:
    """A total whose rate is another one every now and then (log-normal, standard deviation .8)."""
    at, rates = [0.0], []
    while at[-1] < length:
        rates.append(rate * rng.lognormvariate(-0.32, 0.8))
        at.append(at[-1] + rng.uniform(0.02, 0.12) * length)
    steps = [r * (b - a) for r, a, b in zip(rates, at, at[1:], strict=False)]
    totals = [0.0, *accumulate(steps)]

    def curve(t: float) -> float:
        place = min(len(rates), bisect_right(at, t)) - 1
        return totals[place] + rates[place] * (t - at[place])

    return curve


def in_shifts(rate: float, length: float, rng: random.Random) -> Curve:
    """A total that comes in shifts, by a timetable of its own; between them there is little."""
    period, share = rng.uniform(0.07, 0.3) * length, rng.uniform(0.2, 0.6)
    began, quiet = rng.random() * period, rng.uniform(0.02, 0.2)
    shifts = bursty((1 - quiet) * rate, period, share)
    return lambda t: quiet * rate * t + shifts(t + began) - shifts(began)


CASCADES = (8, 30)
"""The least and the most of them in a run."""


def in_cascades(rate: float, length: float, rng: random.Random) -> Curve:
    """A total that comes in cascades at any time, of very unequal sizes: each is quick at first and
    dies away in a time of its own. One part comes evenly, between them too."""
    even = rng.uniform(0.05, 0.3)
    times = [rng.uniform(-0.2, 1.0) * length for _ in range(rng.randint(*CASCADES))]
    cascades = [
        (at, rng.paretovariate(1.5), rng.uniform(0.01, 0.08) * length) for at in sorted(times)
    ]

    def come(t: float) -> float:
        return sum(size * (1 - math.exp((at - t) / tau)) for at, size, tau in cascades if at < t)

    before = come(0.0)
    each = (1 - even) * rate * length / (come(length) - before)
    return lambda t: even * rate * t + each * (come(t) - before)


MOMENTS = 600
"""Of a run, between which a rate is level."""


def drifting(rate: float, length: float, rng: random.Random) -> Curve:
    """A total whose rate drifts up and down without any moment at which it changes: its logarithm
    wanders about its mean, quickly for one total and slowly for another (deviation .75)."""
    step, tau = length / MOMENTS, rng.uniform(0.02, 0.25) * length
    decay = math.exp(-step / tau)
    level, totals = rng.gauss(0, 1), [0.0]
    for _ in range(MOMENTS + 1):
        totals.append(totals[-1] + step * rate * math.exp(0.75 * level - 0.28))
        level = decay * level + rng.gauss(0, 1) * math.sqrt(1 - decay * decay)

    def curve(t: float) -> float:
        place = min(MOMENTS, int(t / step))
        return totals[place] + (t / step - place) * (totals[place + 1] - totals[place])

    return curve


TIDES = 3


def in_tides(rate: float, length: float, rng: random.Random) -> Curve:
    """A total that has tides of several lengths and, as what makes it is adopted or abandoned, a
    trend: the logarithm of its rate is a sum of waves and a straight line."""
    trend = rng.uniform(-0.9, 0.9)
    waves = [
        (2 * math.pi * rng.uniform(0.7, 12), rng.uniform(0.2, 0.7), rng.uniform(0, 2 * math.pi))
        for _ in range(TIDES)
    ]
    step, totals = length / MOMENTS, [0.0]
    for moment in range(MOMENTS + 1):
        x = moment / MOMENTS
        log = trend * (2 * x - 1) + sum(h * math.sin(wave * x + at) for wave, h, at in waves)
        totals.append(totals[-1] + step * rate * math.exp(log - 0.2))

    def curve(t: float) -> float:
        place = min(MOMENTS, int(t / step))
        return totals[place] + (t / step - place) * (totals[place + 1] - totals[place])

    return curve


CAMPAIGNS = (3, 7)
"""The least and the most of them in a run."""


def in_campaigns(rate: float, length: float, rng: random.Random) -> Curve:
    """A total of which a part comes evenly, and the rest in campaigns that overlap: each ramps up,
    stays, and dies away, in times and to a height of its own."""
    even, step = rng.uniform(0.15, 0.45), length / MOMENTS
    campaigns = []
    for _ in range(rng.randint(*CAMPAIGNS)):
        begins, ramps = rng.uniform(-0.15, 0.9) * length, rng.uniform(0.01, 0.1) * length
        stays, dies = rng.uniform(0.02, 0.2) * length, rng.uniform(0.01, 0.08) * length
        campaigns.append((begins, ramps, stays, dies, rng.lognormvariate(0, 0.6)))

    def come(t: float) -> float:
        height = 0.0
        for begins, ramps, stays, dies, high in campaigns:
            since = t - begins
            if since > 0:
                left = math.exp(-max(0.0, since - ramps - stays) / dies)
                height += high * min(1.0, since / ramps) * left
        return height

    totals = [0.0, *accumulate(come(step * moment) for moment in range(MOMENTS + 1))]
    each = (1 - even) * rate * length / totals[MOMENTS]

    def curve(t: float) -> float:
        place = min(MOMENTS, int(t / step))
        campaigned = totals[place] + (t / step - place) * (totals[place + 1] - totals[place])
        return even * rate * t + each * campaigned

    return curve


SOURCES = 24


def by_sources(rate: float, length: float, rng: random.Random) -> Curve:
    """A total of two dozen sources, each with a rate of its own, which are on and off by turns of
    very unequal lengths (a power law). One quiet hour says nothing about the next."""
    changes = list[tuple[float, float]]()
    for _ in range(SOURCES):
        own, at = rng.lognormvariate(0, 0.7), -rng.random() * 0.1 * length
        mean = rng.uniform(0.004, 0.03) * length
        while at < length:
            on, off = (mean * min(20.0, rng.paretovariate(1.3)) for _ in range(2))
            changes += [(max(0.0, at), own), (max(0.0, at + on), -own)]
            at += on + off
    changes.sort()
    times = [0.0, *(at for at, _ in changes)]
    rates = list(accumulate((by for _, by in changes), initial=0.02 * SOURCES))
    spans = (after - at for at, after in pairwise(times))
    totals = [0.0, *accumulate(one * span for one, span in zip(rates, spans, strict=False))]

    def come(t: float) -> float:
        place = bisect_right(times, t) - 1
        return totals[place] + max(0.02, rates[place]) * (t - times[place])

    each = rate * length / come(length)
    return lambda t: each * come(t)


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


Vary = Callable[[float, float, random.Random], Curve]
VARYING: dict[str, tuple[Vary, ...]] = {
    editions.DEVELOPMENT.name: (switching,),
    editions.EARLIER.name: (in_shifts, in_cascades, drifting, in_tides),
    editions.NINTH.name: (in_campaigns,),
    editions.TENTH.name: (by_sources,),
    editions.ELEVENTH.name: (by_contagion,),
}
"""By edition."""


def triggers(split: Split, seeds: int = 1) -> list[Case]:
    """Counter x rate x way to vary x seed; the fast rate is left out, for nothing varies within a
    minute."""
    cases, first = [], 0
    for edition in EDITIONS[split]:
        ways = VARYING[edition.name]
        for name in (*RATES, TIME_TRIGGER):
            for rate in edition.spent_s:
                for number in range(len(ways) * seeds if rate != "fast" else 0):
                    case = _case(split, edition, name, rate, ways[number // seeds], number)
                    case.name = f"trigger-{name}-{rate}-{first + number}"
                    cases.append(case)
        first += len(ways) * seeds
    return cases


def _case(split: Split, edition: Edition, name: str, rate: str, varying: Vary, number: int) -> Case:
    spent = edition.spent_s[rate]
    length = STARTS + REACHED * spent
    rng = random.Random(f"{edition.name}/{name}/{rate}/{number}")
    totals = {one: varying(mean, length, rng) for one, mean in RATES.items()}
    driver: Curve = (lambda t: t) if name == TIME_TRIGGER else totals[name]
    until, part = (length, REACHED) if edition.alike else (STARTS + spent, 1.0)
    each = part * BUDGET / (driver(until) - driver(STARTS))
    series = Series(
        duration=length,
        interval=min(30.0, max(1.0, round(length / 4000))),
        leak=lambda t: each * max(0.0, driver(t) - driver(STARTS)),
        noise=NOISES[rng.randrange(3)],
        seed=rng.randrange(1 << 30),
        counters={COUNTER_FIELDS[one]: total for one, total in totals.items()},
    )
    if edition.alike:
        series = replace(series, **habits(series.seed) | {"read_every": 0.0})
        # What wanders for as long as a campaign lasts cannot be told from one.
        series.wander_s = min(series.wander_s, WANDERS_S)
        series.base = base_of(series.seed)
        series.interval = min(interval_of(rate, series.seed), round(length / 200))
        series.duration += 2 * series.interval
    found = f"trigger-{name}-{rate}-{number}"
    return Case(
        found, f"trigger {name}", split, series, "HostGrowth", STARTS, "malloc_in_use", trigger=name
    )
