"""What only looks like a leak or a hang: outages, storms, starts and long steps.

Each is bounded as in ``host/processes``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate, pairwise

from leaklab.healthy_runs import Spells, last, long, short, summed, wandering
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal


def _daily_accounts(seed: int) -> Series:
    """What each key has used is kept by request, and written off once a day."""
    rng = random.Random(seed)
    load, closes = diurnal(3, 22), rng.uniform(0, 1) * DAY
    worked, each = summed(load), rng.uniform(150, 225) * MIB / (12.5 * DAY)
    return long(
        seed,
        other=lambda t: each * (worked(t) - worked(t - (t - closes) % DAY)),
        other_in="python_objects",
        load=load,
    )


def _exporter_queue(seed: int) -> Series:
    """Who collects the traces is away: they queue, to the queue's bound, and go when it is back."""
    rng = random.Random(seed)
    outages = Spells(rng, (5 * HOUR, 16 * HOUR), (0.5 * HOUR, 5 * HOUR))
    bound, fills = rng.uniform(110, 235) * MIB, rng.uniform(300, 2700)
    drains = rng.uniform(120, 1200)

    def queued(t: float) -> float:
        since = outages.since(t)
        if outages.on(t):
            return bound * min(1.0, since / fills)
        return bound * max(0.0, 1 - since / drains) if since < t else 0.0

    return long(seed, other=queued, other_in="python_objects", load=diurnal(5, 20))


DECODERS = 4


def _decoder_processes(seed: int) -> Series:
    """Videos are decoded by processes that are started when needed, and leave when long idle."""
    rng = random.Random(seed)
    each, idle_s = rng.uniform(55, 85) * MIB, rng.uniform(600, 2400)
    begins = list(accumulate(rng.expovariate(1 / 2400) for _ in range(200)))
    videos = [(at, at + rng.uniform(60, 500)) for at in begins if at % DAY > 7 * HOUR]

    def processes(t: float) -> int:
        return min(DECODERS, sum(at <= t < until + idle_s for at, until in videos))

    return long(
        seed,
        other=lambda t: each * processes(t),
        other_in="anonymous_other",
        load=lambda t: 8 + 3 * sum(at <= t < until for at, until in videos),
    )


def _failover(seed: int) -> Series:
    """Another region is down: its load comes within minutes, and leaves after hours."""
    rng = random.Random(seed)
    outages = Spells(rng, (5 * HOUR, 16 * HOUR), (HOUR, 5 * HOUR))
    day, more, moves = diurnal(4, 20), rng.uniform(1.2, 2.5), rng.uniform(60, 400)

    def moved(t: float) -> float:
        part = min(1.0, outages.since(t) / moves)
        return part if outages.on(t) else (1 - part) * (outages.since(t) < t)

    return long(
        seed, load=lambda t: day(t) * (1 + more * moved(t)), per_request=rng.uniform(3, 4.5) * MIB
    )


def _heavy_tails(seed: int) -> Series:
    """Agents that work for minutes or for half a day: the load has no scale of its own."""
    rng = random.Random(seed)
    tail, edges = rng.uniform(1.2, 1.6), []
    for _ in range(rng.randint(40, 80)):
        at, works = rng.uniform(-DAY, 0.0), 1
        while at < 2 * DAY:
            edges.append((at, works))
            at += (240 if works > 0 else 400) * min(150.0, rng.paretovariate(tail))
            works = -works
    edges.sort()
    times, working = [at for at, _ in edges], [0, *accumulate(works for _, works in edges)]
    return long(
        seed,
        load=lambda t: working[bisect_right(times, t)],
        per_request=rng.uniform(3, 6) * MIB,
    )


def _stormy_days(seed: int) -> Series:
    """Memory is as unsteady as there is work: still at night, and rough by day."""
    rng = random.Random(seed)
    load, deviation = diurnal(1, 28), rng.uniform(30, 55) * MIB
    rough = wandering(rng, rng.uniform(300, 2400))
    return long(
        seed,
        other=lambda t: load(t) / 28 * max(0.0, 90 * MIB + deviation * rough(t)),
        noise=10 * MIB,
        load=load,
    )


def _retry_storm(seed: int) -> Series:
    """Clients that were refused come back all at once, in rounds that are ever further apart."""
    rng = random.Random(seed)
    storms = Spells(rng, (250, 900), (60, 200), HOUR)
    crowd, each = rng.uniform(25, 60), rng.uniform(2, 4) * MIB

    def load(t: float) -> float:
        into_round = math.log2(1 + storms.since(t) / 5) % 1
        return 8 + crowd * storms.on(t) * (into_round < 0.4)

    return short(
        seed,
        load=load,
        per_request=each,
        counters={
            "errors_total": summed(lambda t: 0.05 + 6 * storms.on(t)),
            "aborted_total": summed(lambda t: 0.3 + 2 * storms.on(t)),
        },
    )


def _recompilations(seed: int) -> Series:
    """A shape that no kernel fits: the step waits for a compiler, which needs much for seconds.
    That is rarer from time to time, and what was made stays."""
    rng = random.Random(seed)
    met = sorted(40 * (HOUR / 40) ** rng.random() for _ in range(rng.randint(9, 16)))
    times = [at for before, at in pairwise([0.0, *met]) if at - before > 35]
    takes, scratch = rng.uniform(6, 24), rng.uniform(120, 320) * MIB
    code = rng.uniform(3, 9) * MIB

    def since(t: float) -> float:
        done = bisect_right(times, t)
        return t - times[done - 1] if done else math.inf

    def held(t: float) -> float:
        needed = scratch * since(t) / takes if since(t) < takes else 0.0
        return code * bisect_right(times, t) + needed

    return short(
        seed,
        paused=lambda t: since(t) < takes,
        other=held,
        load=diurnal(4, 15, 2200),
    )


def _straggler(seed: int) -> Series:
    """One rank of many is slow for some minutes, and all wait for it, again and again."""
    rng = random.Random(seed)
    slow = Spells(rng, (300, 1100), (60, 420), HOUR)
    every = rng.uniform(12, 40)
    waits = rng.uniform(0.3, 0.7) * every
    return short(
        seed,
        paused=lambda t: slow.on(t) and slow.since(t) % every < min(waits, 20.0),
        load=lambda t: 22 if slow.on(t) else 12,
    )


def _status_in_step(seed: int) -> Series:
    """Who answers for the status waits for the step to end: long prompts are never seen."""
    rng = random.Random(seed)
    prompts = Spells(rng, (60, 400), (4, 22), HOUR)
    workspace, late = rng.uniform(100, 240) * MIB, rng.uniform(0, 8)
    return short(
        seed,
        paused=prompts.on,
        silent=lambda t: prompts.on(t) or prompts.since(t) < min(t, late),
        other=lambda t: workspace * prompts.on(t),
        counters={"prompt_tokens_total": summed(lambda t: 600 + 5000 * prompts.on(t))},
    )


def _short_certificates(seed: int) -> Series:
    """A new certificate each quarter of an hour or so: new frontends start, nobody is answered for
    seconds, clients come again, and the old frontends end with their last stream."""
    rng = random.Random(seed)
    every, gap = rng.uniform(600, 1500), rng.uniform(2, 8)
    silent, drains = gap + rng.uniform(5, 50), rng.uniform(60, 400)
    size = rng.uniform(60, 120) * MIB

    def since(t: float) -> float:
        return t % every if t >= every else math.inf

    return short(
        seed,
        unresponsive=lambda t: since(t) < gap,
        silent=lambda t: since(t) < silent,
        other=lambda t: size * (since(t) < drains),
        other_in="anonymous_other",
        load=lambda t: 13 * min(1.0, since(t) / 30),
    )


def _restored_snapshot(seed: int) -> Series:
    """It starts from a snapshot of a warm engine, in seconds: pages come when they are touched."""
    rng = random.Random(seed)
    starts = [0.0, *accumulate(rng.uniform(4, 15) * HOUR for _ in range(14))]
    height, tau = rng.uniform(150, 235) * MIB, rng.uniform(600, 5400)

    def age(t: float) -> float:
        return t - last(starts, t)

    return long(
        seed,
        epoch=lambda t: bisect_right(starts, t),
        ready_at=rng.uniform(4, 25),
        other=lambda t: height * (1 - math.exp(-age(t) / tau)),
        other_in="anonymous_other",
        load=diurnal(4, 17),
    )


FAMILIES: dict[str, Build] = {
    "daily accounts": _daily_accounts,
    "exporter queue": _exporter_queue,
    "decoder processes": _decoder_processes,
    "failover": _failover,
    "heavy tails": _heavy_tails,
    "stormy days": _stormy_days,
    "retry storm": _retry_storm,
    "recompilations": _recompilations,
    "straggler": _straggler,
    "status in step": _status_in_step,
    "short-lived certificates": _short_certificates,
    "restored snapshot": _restored_snapshot,
}
