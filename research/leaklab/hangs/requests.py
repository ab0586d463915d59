"""How engines hang: what happens to requests differs, steps end in each.

A peer that sent blocks is lost: running requests end, and those that wait for its blocks hang. One
rank has died, and the others turn in a collective that it never joins. A lock is taken twice in the
scheduler: requests are taken in and given up, and none is worked on. The load of an engine is read
from a page, which is served while the steps behind it have stopped. One client alone asks, and the
engine stops within its request.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from leaklab.hangs.hanging import until
from leaklab.series import Series

TIMES = {
    "transfer": 1510.0,
    "spinning": 2640.0,
    "deadlocked": 730.0,
    "pages": 1850.0,
    "lone": 3020.0,
}
"""When each comes, by name."""


def hanging(series: Series, name: str, at: float, seed: int) -> Series:
    """The engine that hangs at ``at``: its totals stand still from then on."""
    rng = random.Random(f"{name}/{seed}")
    every, lasts = rng.uniform(40, 240), rng.uniform(2, 12)
    usual = replace(series, paused=lambda t: t % every < lasts, counters={})
    return {
        "transfer": _transfer,
        "spinning": _spinning,
        "deadlocked": _deadlocked,
        "pages": _pages,
        "lone": _lone,
    }[name](usual, at, rng)


def _transfer(series: Series, at: float, rng: random.Random) -> Series:
    count, ends, comes = rng.randint(6, 18), rng.uniform(15, 60), rng.uniform(0.3, 1.2)

    def running(t: float) -> float:
        return math.ceil(count * min(1.0, max(0.0, (at - t) / ends)))

    def waiting(t: float) -> float:
        return 2 + min(60.0, comes * max(0.0, t - at + ends))

    return replace(
        series,
        load=lambda t: float(count),
        counters={
            "running": running,
            "waiting": waiting,
            "inflight": lambda t: running(t) + waiting(t),
        },
    )


def _spinning(series: Series, at: float, rng: random.Random) -> Series:
    count, most, cores = rng.randint(8, 24), rng.uniform(30, 120), rng.uniform(1.0, 4.0)
    comes = rng.uniform(0.2, 1.5)

    def waiting(t: float) -> float:
        return min(most, comes * max(0.0, t - at))

    return replace(
        series,
        load=lambda t: float(count),
        cpu_s=lambda t: cores * t,
        counters={
            "running": lambda t: count,
            "waiting": waiting,
            "inflight": lambda t: count + waiting(t),
            "kv_usage_ratio": until(lambda t: 0.6 + 0.2 * math.sin(t / 70), at),
        },
    )


def _deadlocked(series: Series, at: float, rng: random.Random) -> Series:
    count, patience, comes = rng.randint(5, 14), rng.uniform(40, 90), rng.uniform(0.4, 1.5)

    def given_up(t: float) -> float:
        return comes * max(0.0, t - at - patience)

    def inflight(t: float) -> float:
        return count + comes * max(0.0, t - at) - given_up(t)

    return replace(
        series,
        load=lambda t: float(count),
        cpu_s=lambda t: 1.1 * min(t, at) + 0.01 * t,
        counters={
            "running": lambda t: count,
            "inflight": inflight,
            "aborted_total": lambda t: 0.02 * t + given_up(t),
            "prompt_tokens_total": until(lambda t: 2500 * t, at),
        },
    )


def _pages(series: Series, at: float, rng: random.Random) -> Series:
    count = rng.randint(6, 15)
    running = until(lambda t: count + 3 * math.sin(t / 40), at)
    return replace(
        series,
        read_every=rng.choice((2.0, 5.0, 8.0)),
        load=lambda t: float(count),
        counters={
            "running": running,
            "inflight": running,
            "prompt_tokens_total": until(lambda t: 3100 * t, at),
        },
    )


def _lone(series: Series, at: float, rng: random.Random) -> Series:
    turn, works = rng.uniform(120, 400), rng.uniform(20, 90)
    first = at - 5.0

    def asked(t: float) -> float:
        return 1.0 if t >= first or (t < first - 30 and t % turn < works) else 0.0

    return replace(
        series,
        load=lambda t: 3.0 * asked(t),
        counters={"running": asked, "inflight": asked},
    )
