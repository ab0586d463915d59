"""What only looks like a leak: who asks, and when.

Each is bounded as in ``host/collectors``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right

from leaklab.demand import drifting, two_humps
from leaklab.healthy_runs import integral, levels, long, path
from leaklab.heights import MINUTE, MINUTES, any_height, by_changes, by_minutes
from leaklab.series import DAY, HOUR, MIB, Build, Series
from leaklab.views import LONGEST, habits


def _sub_agents(seed: int) -> Series:
    """An agent splits its task and gives the parts to others, which may split theirs. Some tasks
    grow to hundreds of agents within the hour, most end soon; each has its context until its own
    parts are done."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    at, apart, takes = 0.0, rng.uniform(0.2, 4) * HOUR, rng.uniform(60, 1500)
    splits = rng.uniform(0.35, 0.48)
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        begun, count = [at], 0
        while begun and count < 400:
            begins = begun.pop()
            ends, count = begins + rng.expovariate(1 / takes), count + 1
            changes += [(begins, 1.0), (ends, -1.0)]
            if rng.random() < splits:
                begun += [ends, ends]
    agents = levels(changes)
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.01), *changes], any_height(rng)),
        other_in="python_objects",
        load=lambda t: 3 + min(25.0, agents(t)),
    )


def _sorted_corpus(seed: int) -> Series:
    """A corpus is translated whose documents are sorted by length. So each batch holds a little
    more than the one before, for hours, until all is done and the next corpus begins."""
    rng, points = random.Random(seed), [(0.0, 0.0)]
    while points[-1][0] < LONGEST:
        at, lasts = points[-1][0] + rng.uniform(0.1, 8) * HOUR, rng.uniform(0.5, 20) * HOUR
        height, power = rng.uniform(0.4, 1), rng.uniform(0.5, 3.5)
        points.append((at, 0.0))
        points += [(at + lasts * n / 30, height * (n / 30) ** power) for n in range(1, 31)]
        points.append((at + lasts * 1.01, 0.0))
    curve = path(points)
    return long(
        seed,
        **habits(seed),
        other=by_minutes([curve(at) for at in MINUTES], any_height(rng)),
        load=lambda t: 14.0 if curve(t) > 0 else 3.0,
        counters={
            "prompt_tokens_total": integral(lambda t: 900 + 8000 * curve(t), LONGEST),
        },
    )


def _deadlines(seed: int) -> Series:
    """Students hand in at a certain hour, and the nearer it is the more of them ask: twice as many
    when half of the time is left. A minute after it there is nobody, and their drafts go within
    the hour."""
    rng = random.Random(seed)
    ends, at = list[float](), rng.uniform(3, 20) * HOUR
    while not ends or ends[-1] < LONGEST:
        ends.append(at)
        at += rng.choice((12, 24, 24, 36)) * HOUR + rng.uniform(-1, 1) * HOUR
    nearest, power, low = rng.uniform(600, HOUR), rng.uniform(0.6, 1.2), rng.uniform(2, 5)

    def load(t: float) -> float:
        left = ends[min(len(ends) - 1, bisect_right(ends, t))] - t
        return low + 24 * float((nearest / max(nearest, left)) ** power)

    tau, drafts, points = rng.uniform(300, 3 * HOUR), 0.0, list[float]()
    for at in MINUTES:
        drafts += (load(at) - drafts) * MINUTE / tau
        points.append(drafts)
    return long(seed, **habits(seed), other=by_minutes(points, any_height(rng)), load=load)


def _ad_breaks(seed: int) -> Series:
    """In the evening a show asks its audience to ask, in each break. For two or three minutes there
    are several times as many, whose sessions time out in the break after next."""
    rng = random.Random(seed)
    phase, apart, at = rng.uniform(0, DAY), rng.uniform(600, 1800), 0.0
    keeps, changes, crowds = apart * rng.uniform(0.5, 6), list[tuple[float, float]](), 0.0
    asks = list[tuple[float, float]]()
    while at < LONGEST:
        at += apart * rng.uniform(0.85, 1.15)
        hour = (at + phase) / HOUR % 24
        if 18 < hour < 23:
            crowds = rng.uniform(0.3, 1) * math.sin(math.pi * (hour - 18) / 5)
            lasts = rng.uniform(80, 200)
            changes += [(at + lasts * part / 5, crowds / 5) for part in range(5)]
            changes += [(at + keeps + 2 * lasts * part / 5, -crowds / 5) for part in range(5)]
            asks += [(at, 22 * crowds), (at + lasts, -22 * crowds)]
    crowd, day = levels(asks), two_humps(3, 8, phase)
    return long(
        seed,
        **habits(seed) | {"per_request": rng.uniform(1, 4) * MIB},
        other=by_changes([(0.0, 1e-3), *changes], any_height(rng)),
        load=lambda t: day(t) + crowd(t),
    )


def _flow_windows(seed: int) -> Series:
    """The window of a connection to a client far away is made larger as its answers go through,
    twice each few minutes up to 16 MiB, and its buffers with it. Connections end by the day, or
    all at once when a balancer is replaced."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    tau, lives = rng.uniform(120, 2 * HOUR), rng.uniform(1, 30) * HOUR
    replaced = sorted(rng.uniform(0, LONGEST) for _ in range(rng.randint(1, 5)))
    for _ in range(rng.randint(10, 80)):
        at = rng.uniform(0, 1) * lives
        while at < LONGEST:
            ends = at + rng.expovariate(1 / lives)
            ends = min([ends, *(one + rng.uniform(1, 90) for one in replaced if one > at)])
            window, grown = 1.0, at
            changes.append((at, window))
            limit = rng.choice((2, 4, 16, 64))
            while window < limit and grown < ends:
                grown += rng.expovariate(1 / tau)
                if grown < ends:
                    changes.append((grown, window))
                    window *= 2
            changes.append((ends, -window))
            at = ends + rng.uniform(1, 600)
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.1), *changes], any_height(rng)),
        other_in="anonymous_other",
        load=drifting(seed, 9, 2 * HOUR),
    )


def _matches(seed: int) -> Series:
    """Figures of a game speak. A match lasts a quarter of an hour to two hours, and what each
    figure has heard is kept until the match is over. Matches begin at any time, and tournaments
    with dozens of them at once."""
    rng, changes, on = random.Random(seed), list[tuple[float, float]](), list[tuple[float, float]]()
    at, apart, turns = 0.0, rng.uniform(300, 3 * HOUR), 12
    usual = rng.uniform(900, 2 * HOUR)
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        for _ in range(rng.randint(6, 25) if rng.random() < 0.06 else 1):
            lasts, figures = usual * rng.uniform(0.6, 1.4), rng.uniform(0.3, 1)
            changes += [(at + lasts * turn / turns, figures / turns) for turn in range(turns)]
            changes.append((at + lasts, -figures))
            on += [(at, 1.0), (at + lasts, -1.0)]
    played = levels(on)
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.01), *changes], any_height(rng)),
        load=lambda t: 2 + min(30.0, 1.5 * played(t)),
    )


def _trading_day(seed: int) -> Series:
    """When an exchange opens all ask at once, and their number falls as a power of the time since;
    it rises once more before the close. What news they asked about is kept until evening."""
    rng = random.Random(seed)
    phase, power = rng.uniform(0, DAY), rng.uniform(0.25, 0.7)
    opens, closes, left = 9 * HOUR, 17.5 * HOUR, rng.uniform(0.2, 6) * HOUR

    def load(t: float) -> float:
        day = (t + phase) % DAY
        if not opens <= day < closes:
            return 1.5
        falls = math.exp(power * math.log(600 / (600 + day - opens)))
        return 3 + 22 * max(falls, math.exp((day - closes) / 1500))

    worked = integral(load, LONGEST)

    def news(t: float) -> float:
        day = (t + phase) % DAY
        began = max(0.0, t - day + opens)
        if day < opens or day > closes + left:
            return 0.0
        return math.sqrt(worked(t) - worked(began))

    return long(
        seed,
        **habits(seed),
        other=by_minutes([news(at) + 1e-3 for at in MINUTES], any_height(rng)),
        other_in="python_objects",
        load=load,
    )


def _shift_changes(seed: int) -> Series:
    """A hospital works in three shifts. Who comes logs in before who goes has logged out, so that
    for the better part of an hour two shifts have their sessions open; by night there are few."""
    rng = random.Random(seed)
    phase, overlap = rng.uniform(0, 8) * HOUR, rng.uniform(900, 2 * HOUR)
    crews, changes = (rng.uniform(0.6, 1), rng.uniform(0.5, 1), rng.uniform(0.1, 0.5)), []
    for shift in range(-1, 10):
        begins, crew = shift * 8 * HOUR + phase, crews[shift % 3] * rng.uniform(0.8, 1.2)
        for _ in range(20):
            comes = begins + rng.uniform(0, 0.5) * overlap
            goes = begins + 8 * HOUR + rng.uniform(0.4, 1) * overlap
            changes += [(max(0.0, comes), crew / 20), (max(0.0, goes), -crew / 20)]
    sessions = levels(changes)
    return long(
        seed,
        **habits(seed),
        other=by_changes(changes, any_height(rng)),
        load=lambda t: 2 + 11 * sessions(t),
    )


FAMILIES: dict[str, Build] = {
    "sub-agents": _sub_agents,
    "sorted corpus": _sorted_corpus,
    "deadlines": _deadlines,
    "ad breaks": _ad_breaks,
    "flow windows": _flow_windows,
    "matches": _matches,
    "trading day": _trading_day,
    "shift changes": _shift_changes,
}
