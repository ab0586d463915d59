"""What only looks like a leak: what clients make an engine hold.

Each is bounded as in ``host/libraries``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right

from leaklab.healthy_runs import Spells, levels, long, path, short, summed
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal


def _long_recordings(seed: int) -> Series:
    """A recording of a meeting is decoded whole in a minute or so. Its samples go piece by piece,
    as the windows are transcribed."""
    rng = random.Random(seed)
    hourly, decodes = rng.uniform(90, 120) * MIB, rng.uniform(60, 160)
    transcribes, apart = rng.uniform(8, 25), rng.uniform(700, 2600)
    points, begins = [(0.0, 0.0)], list[float]()
    while points[-1][0] < 2 * DAY:
        at = points[-1][0] + rng.expovariate(1 / apart)
        hours = min(3.5, 0.2 * rng.paretovariate(0.9))
        begins.append(at)
        points += [
            (at, 0.0),
            (at + hours * HOUR / decodes, hourly * hours),
            (at + hours * HOUR / decodes + hours * HOUR / transcribes, 0.0),
        ]
    return long(
        seed,
        other=path(points),
        other_in="anonymous_other",
        load=diurnal(3, 12),
        counters={"audios_total": lambda t: bisect_right(begins, t)},
    )


def _estimated_windows(seed: int) -> Series:
    """A connection's window doubles while its sender finds more bandwidth. It goes with its
    connection, which the gateway ends after an hour or so."""
    rng = random.Random(seed)
    most, age = rng.uniform(20, 60), rng.uniform(0.5, 2) * HOUR
    day = diurnal(0.25, 1)
    at, changes = 0.0, list[tuple[float, float]]()
    while at < 2 * DAY:
        at += rng.expovariate(most / age)
        if rng.random() > day(at):
            continue
        ends, size, doubles = at + age * rng.uniform(0.6, 1.4), 0.125 * MIB, at
        largest = min(16.0, 0.5 * rng.paretovariate(0.8)) * MIB
        changes.append((at, size))
        while size < largest and doubles < ends:
            changes.append((doubles, size))
            size *= 2
            doubles += rng.uniform(20, 600)
        changes.append((ends, -size))
    return long(seed, other=levels(changes), load=lambda t: 20 * day(t))


def _limited_strangers(seed: int) -> Series:
    """Who asks too often is refused, so each address has a counter. A scan of the network leaves
    tens of thousands of them, and a sweep removes what was not used for hours."""
    rng = random.Random(seed)
    scans = Spells(rng, (2 * HOUR, 12 * HOUR), (600, 4000))
    rate, bound = rng.uniform(0.03, 0.1) * MIB, rng.uniform(200, 320) * MIB
    forgets, sweep = rng.uniform(1.5, 6) * HOUR, rng.uniform(600, 1800)
    asked = summed(scans.on)
    return long(
        seed,
        other=lambda t: min(bound, rate * (asked(t) - asked(t - t % sweep - forgets))),
        other_in="python_objects",
        load=diurnal(4, 18),
        counters={"errors_total": lambda t: 0.02 * t + 12 * asked(t)},
    )


def _two_sets(seed: int) -> Series:
    """The ids of requests are remembered, so that none is done twice: in two sets. When the younger
    set is full, the older one is dropped."""
    rng = random.Random(seed)
    full, load = rng.uniform(80, 180) * MIB, diurnal(4, 22)
    worked, fills = summed(load), rng.uniform(1.5, 9) * HOUR * 13

    def held(t: float) -> float:
        turn, part = divmod(worked(t) / fills, 1)
        return full * (part + (turn >= 1))

    return long(seed, other=held, other_in="python_objects", load=load)


def _waiting_for_tools(seed: int) -> Series:
    """An agent waits for a tool, a build or a person. The engine keeps its conversation meanwhile,
    mostly for minutes, sometimes for hours."""
    rng = random.Random(seed)
    apart, each, day = rng.uniform(12, 25), rng.uniform(2, 5), diurnal(0.2, 1)
    at, changes = 0.0, list[tuple[float, float]]()
    while at < 2 * DAY:
        at += rng.expovariate(1 / apart)
        if rng.random() < day(at):
            size = each * rng.uniform(0.3, 1.7) * MIB
            waits = min(6 * HOUR, 120 * rng.paretovariate(1.05))
            changes += [(at, size), (at + waits, -size)]
    return long(seed, other=levels(changes), load=lambda t: 16 * day(t))


def _stepped_clock(seed: int) -> Series:
    """Entries expire by the clock on the wall. When the clock is set back, what was stored before
    stays for that much longer, beside what comes."""
    rng = random.Random(seed)
    expires, back = rng.uniform(900, 5400), rng.uniform(1200, 5400)
    usual, at, load = rng.uniform(80, 170) * MIB, rng.uniform(4, 40) * HOUR, diurnal(6, 18)
    stored = summed(load)
    each = usual / (12 * expires)

    def held(t: float) -> float:
        if t < at:
            return each * (stored(t) - stored(t - expires))
        before = stored(at) - stored(min(at, max(at - expires, t - expires - back)))
        return each * (before + stored(t) - stored(max(at, t - expires)))

    return long(seed, other=held, other_in="python_objects", load=load)


def _updated_clients(seed: int) -> Series:
    """A new version of an app sends longer prompts, and its users take a day to update it. As many
    requests as before need ever more memory, until all have the new version."""
    rng = random.Random(seed)
    half, spread = rng.uniform(6, 30) * HOUR, rng.uniform(1.5, 5) * HOUR
    extra, load = rng.uniform(5, 11) * MIB, diurnal(7, 20)

    def updated(t: float) -> float:
        return 1 / (1 + math.exp((half - t) / spread))

    return long(
        seed,
        other=lambda t: extra * load(t) * updated(t),
        load=load,
        counters={"prompt_tokens_total": summed(lambda t: 200 * load(t) * (1 + 2 * updated(t)))},
    )


def _unreachable_pictures(seed: int) -> Series:
    """The host of the pictures does not answer. Requests wait for theirs and fail after a timeout,
    while the engine has little to do."""
    rng = random.Random(seed)
    outages = Spells(rng, (300, 1100), (60, 400), HOUR)
    timeout, rate = rng.uniform(10, 30), rng.uniform(3, 8)
    each = rng.uniform(0.5, 1.7) * MIB

    def waiting(t: float) -> float:
        since = outages.since(t)
        if outages.on(t):
            return rate * min(since, timeout)
        return rate * max(0.0, timeout - since) if since < t else 0.0

    return short(
        seed,
        other=lambda t: each * waiting(t),
        other_in="python_objects",
        load=lambda t: 3 if outages.on(t) else 13,
        counters={
            "inflight": lambda t: waiting(t) + (3 if outages.on(t) else 13),
            "errors_total": summed(lambda t: rate * outages.on(t)),
        },
    )


def _compressed_streams(seed: int) -> Series:
    """Each answer is compressed by itself as it streams, with a window of eight megabytes. So
    memory is as high as there are streams."""
    rng = random.Random(seed)
    rushes = Spells(rng, (60, 500), (30, 400), HOUR)
    most, few = rng.uniform(25, 38), rng.uniform(3, 8)
    return short(
        seed,
        load=lambda t: most if rushes.on(t) else few,
        per_request=rng.uniform(8, 9.5) * MIB,
    )


FAMILIES: dict[str, Build] = {
    "long recordings": _long_recordings,
    "estimated windows": _estimated_windows,
    "limited strangers": _limited_strangers,
    "two sets": _two_sets,
    "waiting for tools": _waiting_for_tools,
    "stepped clock": _stepped_clock,
    "updated clients": _updated_clients,
    "unreachable pictures": _unreachable_pictures,
    "compressed streams": _compressed_streams,
}
