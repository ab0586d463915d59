"""What only looks like a leak or a hang: clients, tools and peers of a service.

Each is bounded as in ``host/allocators``.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate

from leaklab.healthy_runs import Spells, levels, long, path, short, summed
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal, flat


def _many_samples(seed: int) -> Series:
    """Some requests ask for 8 to 64 answers at once, of which each has tokens, text and
    probabilities of its own: a MiB or so. As many requests as before hold many times as much."""
    rng = random.Random(seed)
    asked = Spells(rng, (HOUR, 7 * HOUR), (0.3 * HOUR, 4 * HOUR))
    requests, answers = rng.uniform(5, 12), rng.choice((8, 16, 32, 64))
    height = min(400.0, requests * answers * rng.uniform(0.6, 1.6)) * MIB
    mixes, drains = rng.uniform(60, 2400), rng.uniform(30, 600)

    def sampling(t: float) -> float:
        since = asked.since(t)
        if asked.on(t):
            return 1 - math.exp(-since / mixes)
        return math.exp(-since / drains) if since < t else 0.0

    return long(
        seed,
        other=lambda t: height * sampling(t),
        load=flat(requests),
        counters={
            "generation_tokens_total": summed(
                lambda t: 40 * requests * (1 + (answers - 1) * 0.2 * sampling(t))
            )
        },
    )


def _two_continents(seed: int) -> Series:
    """One continent asks short questions, and the other, half a day later, has long documents read.
    There are about as many requests at any hour, and each of the second kind holds some MiB
    more."""
    rng = random.Random(seed)
    first, second = diurnal(2, rng.uniform(12, 18)), diurnal(1, rng.uniform(12, 20))
    apart, phase = rng.uniform(8, 14) * HOUR, rng.uniform(0, DAY)
    extra = rng.uniform(6, 11) * MIB

    def documents(t: float) -> float:
        return second(t + phase + apart)

    return long(
        seed,
        other=lambda t: extra * documents(t),
        load=lambda t: first(t + phase) + documents(t),
        counters={"prompt_tokens_total": summed(lambda t: 400 + 900 * documents(t))},
    )


def _many_frontends(seed: int) -> Series:
    """A few frontends share a port, and each answers for what it has counted itself. So the totals
    are those of another one at each look, and jump back and forth, while the engine is well."""
    rng = random.Random(seed)
    count, load = rng.randint(2, 6), diurnal(3, 24)
    weights = [rng.uniform(0.5, 1.5) for _ in range(count)]
    asked = [rng.choice(weights) / sum(weights) for _ in range(int(2 * DAY / 30) + 1)]
    done = summed(lambda t: 5 * load(t) / 8)

    def answered(t: float) -> float:
        return asked[int(t / 30)] * done(t)

    return long(
        seed,
        load=load,
        per_request=rng.uniform(2.5, 4) * MIB,
        counters={
            "requests_total": answered,
            "aborted_total": lambda t: 0.03 * answered(t),
            "prompt_tokens_total": lambda t: 700 * answered(t),
        },
    )


EVENTS = 100


def _error_reports(seed: int) -> Series:
    """Errors are reported with the local variables of each frame, which for a request with a
    picture are a MiB or two. The client of the tracker keeps a hundred reports at most, and sends
    one each twenty seconds or so."""
    rng = random.Random(seed)
    failing = Spells(rng, (1.5 * HOUR, 9 * HOUR), (300, 2 * HOUR))
    each, rate = rng.uniform(0.9, 2.3) * MIB, rng.uniform(0.08, 0.5)
    sends, waiting, points = 1 / rng.uniform(12, 40), 0.0, [(0.0, 0.0)]
    for at in range(30, int(2 * DAY), 30):
        came = rate if failing.on(float(at)) else 0.001
        waiting = min(float(EVENTS), max(0.0, waiting + 30 * (came - sends)))
        points.append((float(at), waiting))
    reports = path(points)
    return long(
        seed,
        other=lambda t: each * reports(t),
        other_in="python_objects",
        load=diurnal(4, 17),
        counters={"errors_total": summed(lambda t: rate if failing.on(t) else 0.001)},
    )


BOXES = 4


def _sandboxes(seed: int) -> Series:
    """Programs that the model wrote are run beside it, each in a process with an interpreter and
    what it imports, of 35 to 100 MiB. Most end within a minute, some only by a limit of fifteen,
    and four run at a time."""
    rng = random.Random(seed)
    apart, day, at = rng.uniform(40, 240), diurnal(0.1, 1), 0.0
    free, changes = [0.0] * BOXES, list[tuple[float, float]]()
    while at < 2 * DAY:
        at += rng.expovariate(1 / apart)
        place = min(range(BOXES), key=free.__getitem__)
        if rng.random() > day(at) or free[place] > at:
            continue
        free[place] = at + min(900.0, rng.lognormvariate(math.log(35), 1.3))
        size = rng.uniform(35, 100) * MIB
        changes += [(at, size), (free[place], -size)]
    return long(
        seed,
        other=levels(changes),
        other_in="anonymous_other",
        load=lambda t: 14 * day(t),
    )


def _someones_shell(seed: int) -> Series:
    """Someone opens a shell in the container and looks at a log or a dump with a script. The script
    reads a part of it after another, some hundred MiB in all, and is left open over lunch."""
    rng = random.Random(seed)
    points = [(0.0, 0.0)]
    while points[-1][0] < 2 * DAY:
        at, size = points[-1][0] + rng.uniform(2, 11) * HOUR, rng.uniform(8, 20) * MIB
        points += [(at, 0.0), (at + 5, size)]
        total = rng.uniform(90, 380) * MIB
        while size < total:
            at += rng.uniform(10, 900)
            more = min(total - size, rng.uniform(0.1, 0.6) * total) + 1
            points += [(at + 5, size), (at + 15, size + more)]
            at, size = at + 15, size + more
        ends = at + rng.uniform(120, 5400)
        points += [(ends, size), (ends + 1, 0.0)]
    return long(seed, other=path(points), other_in="anonymous_other", load=diurnal(3, 14))


def _held_in_flight(seed: int) -> Series:
    """A trainer gives new weights while requests are in flight. These are held where they are, for
    as long as the weights take, and go on with the new ones. A bucket of the weights is in shared
    memory meanwhile."""
    rng = random.Random(seed)
    updates = Spells(rng, (60, 500), (4, 21), HOUR)
    bucket = rng.uniform(128, 400) * MIB
    return short(
        seed,
        paused=updates.on,
        other=lambda t: bucket * updates.on(t),
        other_in="shared",
        load=diurnal(8, 24, 2100),
    )


def _cold_first_steps(seed: int) -> Series:
    """A device that had nothing to do saves power, and its library lets go of its handles. The
    first step after some idle minutes takes seconds, with requests waiting for it."""
    rng = random.Random(seed)
    works, takes = Spells(rng, (100, 700), (30, 400), HOUR), rng.uniform(3, 19)
    most = rng.uniform(4, 14)
    return short(
        seed,
        paused=lambda t: works.on(t) and works.since(t) < takes,
        load=lambda t: most if works.on(t) else 0,
        per_request=rng.uniform(2, 6) * MIB,
    )


def _remote_blocks(seed: int) -> Series:
    """A decoder waits for blocks from a prefiller that is slow at times. Its requests wait then,
    none is run, and no step is made for up to twenty seconds. Blocks that have come lie in pinned
    buffers on the host."""
    rng = random.Random(seed)
    waits = Spells(rng, (40, 350), (3, 20), HOUR)
    requests, staged = rng.randint(3, 14), rng.uniform(60, 220) * MIB
    return short(
        seed,
        paused=waits.on,
        other=lambda t: staged * min(1.0, waits.since(t) / 15) * waits.on(t),
        other_in="anonymous_other",
        load=flat(float(requests)),
        counters={
            "running": lambda t: 0 if waits.on(t) else requests,
            "waiting": lambda t: requests if waits.on(t) else 0,
            "inflight": flat(float(requests)),
        },
    )


def _rebuilt_tables(seed: int) -> Series:
    """A frontend reads its prices, quotas and routes anew each few minutes, and builds a second
    table beside the first, which goes when nobody reads it any more. A million keys are 100 to 200
    MiB in Python."""
    rng = random.Random(seed)
    times = list(accumulate(rng.uniform(200, 900) for _ in range(20)))
    size, points = rng.uniform(90, 220) * MIB, [(0.0, 0.0)]
    for at in times:
        builds, grace = rng.uniform(8, 70), rng.uniform(2, 80)
        points += [(at, 0.0), (at + builds, size), (at + builds + grace, size)]
        points.append((at + builds + grace + 1, 0.0))
    return short(seed, other=path(points), other_in="python_objects", load=diurnal(3, 16, 2300))


FAMILIES: dict[str, Build] = {
    "many samples": _many_samples,
    "two continents": _two_continents,
    "many frontends": _many_frontends,
    "error reports": _error_reports,
    "sandboxes": _sandboxes,
    "someone's shell": _someones_shell,
    "held in flight": _held_in_flight,
    "cold first steps": _cold_first_steps,
    "remote blocks": _remote_blocks,
    "rebuilt tables": _rebuilt_tables,
}
