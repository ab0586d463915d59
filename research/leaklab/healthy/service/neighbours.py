"""What only looks like a leak: what runs beside an engine, and what others do.

Each comes back, or has a bound. How high it goes, ``observed`` says.
"""

from __future__ import annotations

import math
import random

from leaklab.days import MINUTE, RHYTHMS, Days
from leaklab.observed import Shown, by_change, by_minute, family
from leaklab.series import DAY, HOUR, Build


def _mount_caches(engine: random.Random, days: Days) -> Shown:
    """A bucket of models and documents is mounted as a folder, by a process that remembers what is
    in it. A job that looks through all of it adds hundreds of thousands of names. They are too old
    after some hours, and go when the next one looks, or when there is no place for more."""
    asked = days.usual_traffic(engine)
    apart, lasts = engine.uniform(0.7, 20) * HOUR, engine.uniform(0.2, 12) * HOUR
    names, takes = engine.uniform(0.2, 2), engine.uniform(120, 2 * HOUR)
    place, used = engine.uniform(0.8, 2.5), engine.uniform(0.0005, 0.01)
    scans, scanning, kept, points = days.times(apart), 0.0, 0.0, list[float]()
    looked, most, other = 0.0, 0.0, 0.0
    for at, load in zip(days.minutes, asked, strict=True):
        if scans and at >= scans[0]:
            scans.pop(0)
            if at - looked > lasts:
                kept = other = 0.0
            scanning, looked, most = takes, at, names * days.rng.uniform(0.4, 1)
        if scanning > 0:
            scanning -= MINUTE
            kept = min(most, kept + most * MINUTE / takes)
        other = min(0.4, other + used * load / 8 * (1 - other))
        points.append(min(place, kept + other))
    return Shown(by_minute(points), asked)


def _tail_sampling(engine: random.Random, days: Days) -> Shown:
    """A collector holds all parts of a trace until it can say whether the trace is worth keeping:
    half a minute, or until the longest request of an agent ends. What it has decided it remembers
    for parts that come late, as far as there are places. When the store is slow, more is held."""
    asked = days.usual_traffic(engine)
    waits, places = engine.uniform(0.5, 90), engine.uniform(0.2, 30) * 60 * 7
    each, slow = engine.uniform(0.0005, 0.05), engine.uniform(3, 40) * HOUR
    spells = [(at, at + days.rng.uniform(300, 2 * HOUR)) for at in days.times(slow)]
    open_now, decided, points = 0.0, 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        is_slow = any(begins <= at < ends for begins, ends in spells)
        open_now += load * days.rng.uniform(0.7, 1.3) - open_now / (waits * (4 if is_slow else 1))
        decided = min(places, decided + load)
        points.append(open_now + each * decided)
    return Shown(by_minute(points), asked)


def _signature_updates(engine: random.Random, days: Days) -> Shown:
    """A scanner that the security team wants in each pod remembers the files that it found clean.
    With each new version of its signatures it begins anew, and has both versions in memory for some
    minutes. Versions come each hour, or once a day."""
    asked = days.usual_traffic(engine)
    every, loads = engine.uniform(1, 26) * HOUR, engine.uniform(60, 1200)
    size, tau = engine.uniform(0.2, 3), engine.uniform(0.2, 15) * 60 * 8
    clean, ends, points = 0.0, 0.0, list[float]()
    versions = days.times(every)
    for at, load in zip(days.minutes, asked, strict=True):
        if versions and at >= versions[0]:
            versions.pop(0)
            clean, ends = 0.0, at + loads
        clean += (1 - clean) * load / tau
        points.append(clean + size * (1 + (at < ends)))
    return Shown(by_minute(points), asked)


def _other_services(engine: random.Random, days: Days) -> Shown:
    """A proxy of the mesh knows each replica of every service in the cluster. When others have much
    to do there are more replicas: they come within minutes, go when they were idle for long, and
    none of that is seen in the engine's own load."""
    asked = days.usual_traffic(engine)
    idle, drains = engine.uniform(5, 300), engine.uniform(1, 90)
    services = [
        days.traffic(engine.choice(RHYTHMS), 1, engine.uniform(5, 40))
        for _ in range(engine.randint(1, 4))
    ]
    fewest = engine.uniform(1, 20)
    replicas, leaving, points = 0.0, 0.0, list[float]()
    for loads in zip(*services, strict=True):
        wanted = fewest + math.ceil(sum(loads) / 2)
        gone = (replicas - wanted) / idle if replicas > wanted else 0.0
        leaving += gone - leaving / drains
        replicas = max(wanted, replicas - gone)
        points.append(math.floor(replicas + leaving))
    return Shown(by_minute([float(one) for one in points]), asked)


def _layered_lists(engine: random.Random, days: Days) -> Shown:
    """Lists of what must not be asked or said come as changes to the list before, each a file in
    shared memory. When there are too many, they are merged into one beside them, and go. A bad week
    brings more changes, and a merge waits for a quiet moment."""
    asked = days.usual_traffic(engine)
    apart, most = engine.uniform(0.05, 2) * HOUR, engine.randint(6, 60)
    first = base = engine.uniform(0.5, 6) * most * 0.3
    layers, size, changes = 0, 0.0, [(0.0, base)]
    for at in days.times(apart):
        layer = 0.5 * days.rng.lognormvariate(0, 0.8)
        changes.append((at, layer))
        layers, size = layers + 1, size + layer
        if layers >= most and (days.hour(at) < 6 or layers >= 1.5 * most):
            merged, takes = first * days.rng.uniform(0.9, 1.2), days.rng.uniform(60, 1500)
            changes += [(at + takes * part / 6, merged / 6) for part in range(1, 7)]
            changes.append((at + takes + 10, -base - size))
            base, layers, size = merged, 0, 0.0
    return Shown(by_change(days, changes), asked)


def _in_doubt(engine: random.Random, days: Days) -> Shown:
    """A transfer between two stores that was cut off in the middle is in doubt, and what it moves
    is kept until a person has decided. Hundreds of them come with each failure of a network, at
    any hour, and people decide by day. After two days they are given up."""
    asked = days.usual_traffic(engine)
    apart, begins, ends = (
        engine.uniform(3, 30) * HOUR,
        engine.uniform(7, 11),
        engine.uniform(15, 22),
    )
    size, waits = engine.uniform(0.7, 2), engine.uniform(0.2, 5) * HOUR
    changes = [(0.0, 0.01)]
    for at in days.times(apart):
        lump, comes = min(5.0, size * days.rng.paretovariate(1.5)), days.rng.uniform(30, 3000)
        changes += [(at + comes * part / 10, lump / 10) for part in range(10)]
        decided = at + comes + waits * days.rng.uniform(0.3, 1)
        while not begins <= days.hour(decided) < ends:
            decided += 600
        decided = min(decided, at + 2 * DAY)
        changes += [(decided + 60 * days.rng.uniform(0, 20), -lump / 4) for _ in range(4)]
    return Shown(by_change(days, changes), asked)


def _slow_evictors(engine: random.Random, days: Days) -> Shown:
    """A pool of connections to other services looks at three idle ones each half a minute or each
    half an hour, and closes those that were idle for too long. What a rush has opened in a minute
    goes one by one, for hours or a day."""
    asked = days.usual_traffic(engine)
    closes, spread = engine.uniform(0.002, 0.15), engine.uniform(1, 3)
    bound, is_open, points = engine.uniform(25, 60), 0.0, list[float]()
    for load in asked:
        needs = min(bound, max(0.0, days.rng.gauss(load, spread)))
        is_open = max(needs, is_open - closes)
        points.append(is_open)
    return Shown(by_minute(points), asked)


FAMILIES: dict[str, Build] = {
    "mount caches": family(_mount_caches, "anonymous_other", malloc=False),
    "tail sampling": family(_tail_sampling, "anonymous_other", malloc=False),
    "signature updates": family(_signature_updates, "anonymous_other", malloc=False),
    "other services": family(_other_services, "anonymous_other", malloc=False),
    "layered lists": family(_layered_lists, "shared"),
    "in doubt": family(_in_doubt, "malloc_in_use"),
    "slow evictors": family(_slow_evictors, "malloc_in_use"),
}
