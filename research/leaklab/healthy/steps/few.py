"""What only looks like a hang: steps that are few, long or hardly seen.

None seems to be still for half a minute while it has work.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right

from leaklab.demand import drifting
from leaklab.healthy.steps.moments import ENDS
from leaklab.healthy_runs import Spells, short
from leaklab.series import MIB, Build, Curve, Series, flat, sawtooth
from leaklab.views import habits


def _totals(times: list[float], each: float = 1.0) -> Curve:
    """What grows by ``each`` at each of the times."""
    return lambda t: each * bisect_right(times, t)


def _hardly_asked(seed: int) -> Series:
    """An engine that hardly anybody asks: a short request each few minutes, and nothing for half an
    hour at times. Its first step after that takes some seconds."""
    rng = random.Random(seed)
    asked = Spells(rng, (60, rng.uniform(300, 2400)), (3, 45), ENDS)
    first = rng.uniform(0.5, 9)
    return short(
        seed,
        **habits(seed) | {"noise": rng.uniform(2, 12) * MIB},
        fine=True,
        paused=lambda t: asked.on(t) and asked.since(t) < first,
        load=lambda t: 1.5 * asked.on(t),
    )


def _read_by_page(seed: int) -> Series:
    """What the engine does is read from its page of metrics, each dozen seconds. Between two reads
    nothing moves, and at each read much has been done; steps of some seconds are among it."""
    rng = random.Random(seed)
    pauses = Spells(rng, (40, 400), (2, 9), ENDS)
    return short(
        seed,
        **habits(seed) | {"read_every": rng.choice((8.0, 10.0, 12.0))},
        fine=True,
        paused=pauses.on,
        load=drifting(seed, 11, 700),
        other=sawtooth(rng.uniform(40, 120) * MIB, rng.uniform(300, 900)),
    )


def _counted_at_the_end(seed: int) -> Series:
    """A small server counts the tokens and the steps of a request when the request ends, which
    takes up to a quarter of a minute. Until then it has requests, and nothing seems to be done."""
    rng = random.Random(seed)
    ends, at, longest = list[float](), 0.0, rng.uniform(9, 17)
    while at < ENDS:
        at += min(longest, max(1.5, rng.lognormvariate(math.log(0.5 * longest), 0.5)))
        ends.append(at)
    tokens, count = rng.uniform(80, 400), rng.randint(1, 3)
    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        malloc=False,
        load=flat(float(count)),
        counters={
            "running": flat(float(count)),
            "inflight": flat(float(count)),
            "requests_total": _totals(ends),
            "steps_total": _totals(ends, tokens),
            "generation_tokens_total": _totals(ends, tokens),
        },
    )


def _steps_of_seconds(seed: int) -> Series:
    """On a processor, without a device, a step with a long prompt takes ten seconds or more, and
    each takes one at least. Few ask, and all cores are busy."""
    rng = random.Random(seed)
    steps, at, usual = list[float](), 0.0, rng.uniform(1.5, 7)
    while at < ENDS:
        at += min(17.0, rng.lognormvariate(math.log(usual), 0.6))
        steps.append(at)
    count, cores = rng.randint(1, 5), rng.uniform(1.8, 7.6)
    return short(
        seed,
        **habits(seed) | {"cpu_s": lambda t: cores * t, "read_every": 0.0},
        malloc=seed % 2 == 0,
        load=flat(float(count)),
        counters={
            "running": flat(float(count)),
            "inflight": flat(float(count)),
            "steps_total": _totals(steps),
            "requests_total": _totals(steps, 1 / 30),
            "generation_tokens_total": _totals(steps, count),
        },
    )


def _whole_batches(seed: int) -> Series:
    """A server runs one batch after another, each as one step from its first to its last token.
    Who comes meanwhile waits for the next, and with nobody there none is run."""
    rng = random.Random(seed)
    begins, ends, at = list[float](), list[float](), 0.0
    size, longest = rng.choice((4, 8, 16, 32)), rng.uniform(7, 18)
    while at < ENDS:
        at += rng.choice((0.05, 0.05, 0.05, rng.uniform(1, 90)))
        begins.append(at)
        at += rng.uniform(0.4, 1.0) * longest
        ends.append(at)
    comes = rng.uniform(0.3, 0.9) * size / longest

    def runs(t: float) -> bool:
        return bisect_right(begins, t) > bisect_right(ends, t)

    def waiting(t: float) -> float:
        since = begins[bisect_right(begins, t) - 1]
        return comes * (t - since) if runs(t) else 0.0

    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        load=lambda t: 0.7 * size if runs(t) else 0.0,
        counters={
            "running": lambda t: 0.7 * size * runs(t),
            "waiting": waiting,
            "inflight": lambda t: 0.7 * size * runs(t) + waiting(t),
            "requests_total": _totals(ends, 0.7 * size),
            "steps_total": _totals(ends),
            "generation_tokens_total": _totals(ends, 90 * size),
        },
    )


FAMILIES: dict[str, Build] = {
    "hardly asked": _hardly_asked,
    "read by page": _read_by_page,
    "counted at the end": _counted_at_the_end,
    "steps of seconds": _steps_of_seconds,
    "whole batches": _whole_batches,
}
