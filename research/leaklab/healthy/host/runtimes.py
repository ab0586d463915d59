"""What only looks like a leak: runtimes and pools of the host.

Each comes back, or has a bound. How high it goes, ``observed`` says.
"""

from __future__ import annotations

import math
import random
from collections import deque

from leaklab.days import MINUTE, Days, worked_off
from leaklab.observed import Shown, by_change, by_minute, family
from leaklab.series import DAY, HOUR, Build


def _victim_caches(engine: random.Random, days: Days) -> Shown:
    """A gateway in Go keeps freed buffers in pools. A garbage collection moves what a pool holds to
    a second place, and drops what nobody has taken from there since the last one. With a limit of
    memory instead of a ratio, collections are hours apart."""
    asked = days.usual_traffic(engine)
    every, spread = engine.uniform(0.3, 9) * 60 * 8, engine.uniform(1, 4)
    pool, victims, made, points = 0.0, 0.0, 0.0, list[float]()
    for load in asked:
        needs = max(0.0, days.rng.gauss(load, spread))
        if needs > pool:
            victims, pool = max(0.0, victims - needs + pool), needs
        made += load
        if made > every:
            pool, victims, made = 0.3 * needs, pool, 0.0
        points.append(pool + victims)
    return Shown(by_minute(points), asked)


METHODS = 150


def _code_cache(engine: random.Random, days: Days) -> Shown:
    """A gateway in Java compiles a method when it was called often enough, with counters in its
    code, and once more without them when it is hot. Code that rests on an assumption is thrown away
    when a plug-in of a new kind is loaded, and code that got cold is swept."""
    asked = days.usual_traffic(engine)
    first, power = engine.uniform(0.5, 60) * 8, engine.uniform(0.7, 1.4)
    needs = [first * (n + 1) ** power * engine.gammavariate(3, 1 / 3) for n in range(METHODS)]
    loads, thrown = engine.uniform(4, 40) * HOUR, engine.uniform(0.1, 0.6)
    plugins, begun = days.times(loads), [0.0] * METHODS
    tiers, points = [0] * METHODS, list[float]()
    for at, work in zip(days.minutes, worked_off(asked), strict=True):
        if plugins and at >= plugins[0]:
            plugins.pop(0)
            for n in range(METHODS):
                if days.rng.random() < thrown:
                    begun[n], tiers[n] = work, 0
        if at % 1200 == 0:
            for n in range(METHODS):
                ratio = (work - begun[n]) / needs[n]
                tiers[n] = 0 if ratio < 1 else 3 if ratio < 8 else 2
        points.append(float(sum(tiers)))
    return Shown(by_minute(points), asked)


def _soft_references(engine: random.Random, days: Days) -> Shown:
    """A server in Java keeps parsed schemas by soft references. A full collection clears those that
    were not used for so many seconds as there are MiB free. It comes when the heap is full, and
    the heap is large."""
    asked = days.usual_traffic(engine)
    full, keeps = engine.uniform(4, 60) * 60 * 7, engine.uniform(0.05, 0.6)
    idle = engine.uniform(2, 30) * 60
    entries, total, points = deque[tuple[float, float]](), 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        new = max(0.0, days.rng.gauss(load, 2))
        entries.append((at, new))
        total += new
        if total > full:
            age = max(idle * 10, keeps * (at - entries[0][0]))
            while len(entries) > 1 and entries[0][0] < at - age:
                total -= entries.popleft()[1]
        if total > full:
            entries.clear()
            total = 0.0
        points.append(total)
    return Shown(by_minute(points), asked)


def _adaptive_windows(engine: random.Random, days: Days) -> Shown:
    """Whether prompts drift is told by a window for each of some features. A window gets longer as
    long as its old half looks like its young half, up to a bound. When it does not, the old part is
    dropped."""
    asked = days.usual_traffic(engine)
    count, apart = engine.randint(2, 16), engine.uniform(3, 60) * HOUR
    bounds = [engine.uniform(0.3, 1) * engine.uniform(10, 90) * 60 * 7 for _ in range(count)]
    lengths, points = [0.0] * count, list[float]()
    for load in asked:
        for n in range(count):
            lengths[n] = min(bounds[n], lengths[n] + load)
            if days.rng.random() < MINUTE / apart:
                lengths[n] *= days.rng.uniform(0.05, 0.6)
        points.append(sum(lengths))
    return Shown(by_minute(points), asked)


def _ghost_entries(engine: random.Random, days: Days) -> Shown:
    """A cache of prefixes remembers what it has evicted, by its hash, so as to keep it longer when
    it comes again. Nothing is evicted until the cache is full, hours after the start. There are as
    many hashes as places in the cache, at most, and none after new weights."""
    asked = days.usual_traffic(engine)
    places, ghosts = engine.uniform(1, 14) * 60 * 7, engine.uniform(0.5, 4)
    weights = days.times(engine.uniform(20, 150) * HOUR)
    cached, kept, points = 0.0, 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        if weights and at >= weights[0]:
            weights.pop(0)
            cached = kept = 0.0
        new = load * (1 - 0.5 * kept / (ghosts * places))
        kept = min(ghosts * places, kept + max(0.0, cached + new - places))
        cached = min(places, cached + new)
        points.append(kept + 0.02 * cached)
    return Shown(by_minute(points), asked)


def _tenant_isolates(engine: random.Random, days: Days) -> Shown:
    """Templates and tools of each tenant run in an engine for scripts of their own, whose heap may
    grow to a limit. An engine at its limit is replaced by a new one. Those of large tenants reach
    it within the hour, and those of small ones on the third day."""
    asked = days.usual_traffic(engine)
    count, power = engine.randint(6, 24), engine.uniform(0.6, 1.4)
    limit = engine.uniform(0.5, 12) * 60 * 8
    rates = [(n + 1.0) ** -power * engine.uniform(0.6, 1.4) for n in range(count)]
    heaps, points = [0.0] * count, list[float]()
    for load in asked:
        busy = load * days.rng.uniform(0.5, 1.5)
        for n, rate in enumerate(rates):
            heaps[n] += rate * busy
            if heaps[n] > limit:
                heaps[n] = 0.1 * limit
        points.append(sum(heaps))
    return Shown(by_minute(points), asked)


def _overload_threshold(engine: random.Random, days: Days) -> Shown:
    """A proxy in C++ has ever more half-used pages as connections come and go. Its overload manager
    gives free pages back, but only while the heap is above a threshold of its own, which it takes
    some hours or days to reach."""
    asked = days.usual_traffic(engine)
    takes, live = engine.uniform(4, 50) * 60 * 7, engine.uniform(0.005, 0.03)
    gives, fades = engine.uniform(0.02, 0.25), engine.uniform(0.0, 0.6) / DAY
    free, points = 0.0, list[float]()
    for load in asked:
        free += load / takes * days.rng.uniform(0, 2) - free * fades * MINUTE
        if free + live * load > 1:
            free -= gives * days.rng.random()
        points.append(max(0.0, free) + live * load)
    return Shown(by_minute(points), asked)


def _balloons(engine: random.Random, days: Days) -> Shown:
    """Tools run in small virtual machines beside the engine. A machine keeps each page that its
    guest has touched, until a balloon takes those back that the guest has free: in turns, hours
    apart, and only in a machine that has little to do."""
    asked = days.usual_traffic(engine)
    count, every = engine.randint(2, 10), engine.uniform(0.5, 12) * HOUR
    touches, live = engine.uniform(1, 30) * 60 * 8, engine.uniform(0.1, 0.5)
    used, points = [0.1] * count, list[float]()
    for load in asked:
        for n in range(count):
            busy = load * days.rng.uniform(0, 2)
            used[n] += (1 - used[n]) * busy / touches
            if busy < 8 and days.rng.random() < MINUTE / every:
                used[n] *= days.rng.uniform(live, 1)
        points.append(sum(used))
    return Shown(by_minute(points), asked)


def _prepared_statements(engine: random.Random, days: Days) -> Shown:
    """Each connection to the database of users keeps the statements that it has prepared, a hundred
    at most, and a connection is replaced when it has reached its age. More connections are opened
    when many are in use, and half of them are left when not."""
    asked = days.usual_traffic(engine)
    lives, met = engine.uniform(0.5, 40) * HOUR, engine.uniform(0.1, 0.8)
    least, each = engine.randint(2, 10), engine.uniform(0.5, 3)
    changes, begins = list[tuple[float, float]](), list[float]()
    for at, load in zip(days.minutes[::10], asked[::10], strict=True):
        begins = [one for one in begins if one > at - lives * (0.7 + 0.3 * math.sin(one) ** 2)]
        while len(begins) < least + each * load:
            begins.append(at + days.rng.uniform(0, 600))
            ends = begins[-1] + lives * (0.7 + 0.3 * math.sin(begins[-1]) ** 2)
            for part in range(1, 11):
                filled = begins[-1] - met * lives * math.log(1 - 0.095 * part)
                if filled < ends:
                    changes += [(filled, 1.0), (ends, -1.0)]
    return Shown(by_change(days, changes), asked)


FAMILIES: dict[str, Build] = {
    "victim caches": family(_victim_caches, "anonymous_other", malloc=False),
    "code cache": family(_code_cache, "anonymous_other", malloc=False),
    "soft references": family(_soft_references, "anonymous_other", malloc=False),
    "adaptive windows": family(_adaptive_windows, "python_objects"),
    "ghost entries": family(_ghost_entries, "python_objects"),
    "tenant isolates": family(_tenant_isolates, "anonymous_other"),
    "overload threshold": family(_overload_threshold, "anonymous_other", malloc=False),
    "balloons": family(_balloons, "anonymous_other"),
    "prepared statements": family(_prepared_statements, "malloc_in_use"),
}
