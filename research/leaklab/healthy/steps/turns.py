"""What only looks like a hang: steps that take seconds, each told by itself.

None is still for half a minute while it has work.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Any

from leaklab.healthy_runs import Spells, integral, short
from leaklab.observed import daily_height
from leaklab.series import HOUR, Build, Curve, Series, flat
from leaklab.views import BRIEF, habits

ENDS = BRIEF + HOUR
LONGEST_S = 18.0
"""Of what holds steps up."""


def totals(times: list[float], each: float = 1.0) -> Curve:
    return lambda t: each * bisect_right(times, t)


def waiting_engine(seed: int, held: Curve, where: str, **settings: Any) -> Series:
    """``held`` is the share of the height at which its memory is."""
    height = daily_height(seed)
    own = habits(seed) | {"read_every": 0.0, "fine": True} | settings
    return short(seed, **own, other=lambda t: height * held(t), other_in=where)


def queues(running: Curve, waiting: Curve) -> dict[str, Curve]:
    return {
        "running": running,
        "waiting": waiting,
        "inflight": lambda t: running(t) + waiting(t),
    }


def stepped(ends: list[float], count: int, tokens: float) -> dict[str, Curve]:
    """An engine with so many requests, which tells its steps one by one."""
    return queues(flat(float(count)), flat(0.0)) | {
        "steps_total": totals(ends),
        "requests_total": totals(ends, count / 60),
        "generation_tokens_total": totals(ends, tokens),
    }


def _recomputed_prompts(seed: int) -> Series:
    """The cache is too small for all who run. The youngest is put back to wait and its prompt is
    worked on again later, for seconds, so that a rush of long prompts makes few tokens."""
    rng = random.Random(seed)
    short_of = Spells(rng, (300, 3000), (200, 2400), ENDS)
    count, slow, ends, at = rng.randint(4, 16), rng.uniform(2, 9), list[float](), 0.0
    preempted = list[float]()
    while at < ENDS:
        crowded = short_of.on(at)
        at += min(LONGEST_S, rng.lognormvariate(0, 0.5) * (slow if crowded else 0.3))
        ends.append(at)
        if crowded and rng.random() < 0.6:
            preempted.append(at)
    swings = integral(lambda t: rng.uniform(0.3, 1.0), ENDS)

    def waiting(t: float) -> float:
        return round(count * 0.5 * ((swings(t) / 30) % 1)) if short_of.on(t) else 0

    return waiting_engine(
        seed,
        lambda t: waiting(t) / count,
        "malloc_in_use",
        load=flat(float(count)),
        counters=stepped(ends, count, count / 2)
        | queues(lambda t: count - waiting(t), waiting)
        | {"preemptions_total": totals(preempted)},
    )


def _lost_packets(seed: int) -> Series:
    """Ranks on several machines exchange what they have after each layer. While a switch is crowded
    packets are lost, and each is sent again after a time that doubles: half a second, one, two,
    four, up to sixteen."""
    rng = random.Random(seed)
    crowded = Spells(rng, (300, 4000), (120, 1800), ENDS)
    ends, at, lost, count = list[float](), 0.0, rng.uniform(0.3, 0.65), rng.randint(3, 30)
    while at < ENDS:
        step, wait = rng.uniform(0.15, 0.4), 0.5
        while crowded.on(at) and wait <= 8 and rng.random() < lost:
            step, wait = step + wait, 2 * wait
        at += step
        ends.append(at)
    return waiting_engine(
        seed,
        lambda t: min(1.0, crowded.since(t) / 100) * crowded.on(t),
        "anonymous_other",
        load=flat(float(count)),
        counters=stepped(ends, count, count),
    )


def _host_side_beams(seed: int) -> Series:
    """Each step makes thousands of hypotheses, which Python sorts, extends and prunes on one
    processor. The device waits for that: seconds for short texts, a dozen for long ones."""
    rng = random.Random(seed)
    ends, at, usual, text = list[float](), 0.0, rng.uniform(0.8, 5), rng.uniform(20, 80)
    while at < ENDS:
        at += min(LONGEST_S, usual * (1 + len(ends) % text / text * 2) * rng.uniform(0.8, 1.2))
        ends.append(at)
    count = rng.randint(1, 6)
    return waiting_engine(
        seed,
        lambda t: (bisect_right(ends, t) % text) / text,
        "python_objects",
        cpu_s=lambda t: 1.05 * t,
        load=flat(float(count)),
        counters=stepped(ends, count, 40),
    )


def _volunteer_stages(seed: int) -> Series:
    """The layers are spread over machines of volunteers, far apart. A step takes as long as their
    networks do. When one of them leaves, another one is looked for and gets all that was said so
    far again, and the step waits for that."""
    rng = random.Random(seed)
    ends, at, leaves = list[float](), 0.0, rng.uniform(0.005, 0.06)
    usual, count, again = rng.uniform(0.6, 4), rng.randint(1, 8), list[float]()
    while at < ENDS:
        step = usual * rng.lognormvariate(0, 0.4)
        if rng.random() < leaves:
            step += rng.uniform(4, 14)
            again.append(at)
        at += min(LONGEST_S, step)
        ends.append(at)
    return waiting_engine(
        seed,
        lambda t: (bisect_right(again, t) % 7) / 7,
        "anonymous_other",
        load=flat(float(count)),
        counters=stepped(ends, count, count) | {"prompt_tokens_total": totals(again, 3000.0)},
    )


FAMILIES: dict[str, Build] = {
    "recomputed prompts": _recomputed_prompts,
    "lost packets": _lost_packets,
    "host-side beams": _host_side_beams,
    "volunteer stages": _volunteer_stages,
}
