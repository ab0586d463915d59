"""What only looks like a leak: caches, tiers and stores of engines.

Each is bounded as in ``host/allocators``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from itertools import accumulate

from leaklab.healthy_runs import Spells, levels, long, path, summed
from leaklab.series import DAY, GIB, HOUR, MIB, Build, Series, diurnal


def _rolling_day(seed: int) -> Series:
    """For the bill and the quotas each request leaves a record, which is kept for 24 hours. So
    memory rises for the whole first day: 600 bytes for each of four requests a second are 200
    MiB."""
    rng = random.Random(seed)
    load = diurnal(3, rng.uniform(14, 26))
    worked, height = summed(load), rng.uniform(130, 240) * MIB
    each = height / worked(DAY)
    return long(
        seed,
        other=lambda t: each * (worked(t) - worked(t - DAY)),
        other_in="python_objects",
        load=load,
    )


def _kept_lineage(seed: int) -> Series:
    """Ray keeps what made each result, so that a lost one can be made again. When that is too
    large, the older half goes. Its bound is a GiB for a node, a fifth of that for one worker."""
    rng = random.Random(seed)
    full, load = rng.uniform(140, 290) * MIB, diurnal(4, 20)
    worked, fills = summed(load), rng.uniform(1.5, 10) * HOUR * 12

    def kept(t: float) -> float:
        part = worked(t) / fills
        return full * (part if part < 1 else 0.5 + (part - 1) % 0.5)

    return long(seed, other=kept, load=load)


def _written_back(seed: int) -> Series:
    """A tier in the ledger writes what it evicts to disk. Blocks that wait for that are in no
    ledger. While another tenant keeps the disk busy, there are as many as the queue has places: 64
    of a few MiB each."""
    rng = random.Random(seed)
    bound, tau = rng.uniform(0.5, 1.0) * GIB, rng.uniform(0.3, 3) * HOUR
    busy = Spells(rng, (2 * HOUR, 8 * HOUR), (0.3 * HOUR, 3 * HOUR))
    queue, fills, drains = 64 * rng.uniform(1.5, 4.5) * MIB, rng.uniform(300, 4000), 300.0

    def tier(t: float) -> float:
        return bound * (1 - math.exp(-t / tau))

    def queued(t: float) -> float:
        since = busy.since(t)
        if busy.on(t):
            return queue * (1 - math.exp(-since / fills)) * tier(t) / bound
        return queue * math.exp(-since / drains) * tier(t) / bound if since < t else 0.0

    return long(
        seed,
        other=lambda t: tier(t) + queued(t),
        other_in="anonymous_other",
        ledger=tier,
        ledger_bound=int(bound),
        load=diurnal(5, 21),
    )


def _processed_pictures(seed: int) -> Series:
    """Pictures that were made ready for the encoder stay in a cache, for the next turn of their
    conversation. One of 1,000 patches is 4.7 MB. The engine accounts for the cache, which is full
    within hours."""
    rng = random.Random(seed)
    bound, cache, at = rng.choice((0.5, 1.0)) * GIB, deque[float](), 0.0
    pictured, changes, begins = Spells(rng, (HOUR, 5 * HOUR), (900, 4 * HOUR)), [], [(0.0, 0.0)]
    while at < 2 * DAY:
        at += rng.expovariate(1 / (25 if pictured.on(at) else 400))
        cache.append(min(24.0, rng.lognormvariate(1.2, 0.8)) * MIB)
        changes.append((at, cache[-1]))
        begins.append((at, 1.0))
        while sum(cache) > bound:
            changes.append((at, -cache.popleft()))
    held = levels(changes)
    return long(
        seed,
        other=held,
        other_in="python_objects",
        ledger=held,
        ledger_bound=int(bound),
        load=diurnal(3, 15),
        counters={"images_total": levels(begins)},
    )


def _admitted_again(seed: int) -> Series:
    """A cache takes only what was asked for before. The cache is in the ledger and fills slowly;
    what tells whether a key was met is not, grows to some ten MiB and begins anew."""
    rng = random.Random(seed)
    load, bound = diurnal(4, 22), rng.uniform(0.4, 0.9) * GIB
    worked, fills = summed(load), rng.uniform(6, 30) * HOUR * 12
    keys, anew = rng.uniform(30, 80) * MIB, rng.uniform(0.7, 5) * HOUR * 12

    def cached(t: float) -> float:
        return bound * (1 - math.exp(-worked(t) / fills))

    return long(
        seed,
        other=lambda t: cached(t) + keys * (worked(t) / anew % 1),
        ledger=cached,
        ledger_bound=int(bound),
        load=load,
    )


def _slot_checkpoints(seed: int) -> Series:
    """llama.cpp keeps checkpoints of a slot's context, so that a changed prompt need not be read
    anew: three of some MiB for each of a few slots, until the slot gets another conversation. It
    says nothing about its memory."""
    rng = random.Random(seed)
    size, changes = rng.uniform(7, 13) * MIB, list[tuple[float, float]]()
    for _ in range(rng.choice((4, 6, 8))):
        at, kept, apart = rng.uniform(0, 2 * HOUR), 0, rng.uniform(200, 2500)
        while at < 2 * DAY:
            ends = rng.random() < 0.2
            change = -kept if ends else min(3 - kept, 1)
            changes.append((at, change * size))
            kept += change
            at += rng.expovariate(1 / apart)
    return long(seed, malloc=False, other=levels(changes), load=diurnal(1, 5))


def _primitive_cache(seed: int) -> Series:
    """On CPUs a library of kernels keeps 1,024 primitives, each made for a shape that is new: code
    and reordered constants of 200 KiB or so. New shapes get rarer, and in the end the oldest
    primitive goes for each."""
    rng = random.Random(seed)
    times = sorted(30 * (2 * DAY / 30) ** rng.random() for _ in range(rng.randint(500, 1800)))
    least = rng.uniform(0.045, 0.08)
    sizes = [min(1.5, least * rng.paretovariate(1.4)) * MIB for _ in times]
    gone = zip(times[1024:], sizes, strict=False)
    return long(
        seed,
        malloc=False,
        other=levels([*zip(times, sizes, strict=True), *((at, -size) for at, size in gone)]),
        other_in="anonymous_other",
        load=diurnal(2, 9),
    )


def _uploaded_files(seed: int) -> Series:
    """Files that clients upload for a batch lie in a file system in memory. Some clients remove
    theirs, the others go after 24 hours, and above a quota of some 200 MiB none is taken."""
    rng = random.Random(seed)
    apart, quota = rng.uniform(500, 2600), rng.uniform(190, 250) * MIB
    day, at, used = diurnal(0.15, 1), 0.0, 0.0
    held, changes = list[tuple[float, float]](), list[tuple[float, float]]()
    while at < 2 * DAY:
        at += rng.expovariate(1 / apart)
        if rng.random() > day(at):
            continue
        while held and held[0][0] <= at:
            used -= heapq.heappop(held)[1]
        size = min(80.0, 2 * rng.paretovariate(1.0)) * MIB
        if used + size > quota:
            continue
        used += size
        ends = at + (rng.uniform(300, 5400) if rng.random() < 0.5 else DAY)
        heapq.heappush(held, (ends, size))
        changes += [(at, size), (ends, -size)]
    return long(seed, other=levels(changes), other_in="shared", load=lambda t: 3 + 12 * day(t))


def _expired_on_access(seed: int) -> Series:
    """Each tenant has a cache whose entries expire, but are only removed when that tenant asks
    again: the next morning, or hours later. A cache holds some hundred answers."""
    rng = random.Random(seed)
    tenants = []
    for _ in range(rng.randint(12, 30)):
        points, at, size = [(0.0, 0.0)], rng.uniform(0, 14) * HOUR, rng.paretovariate(1.3)
        while at < 2 * DAY:
            fills, met = rng.uniform(600, 4 * HOUR), size * rng.uniform(0.5, 1)
            points += [(at, points[-1][1]), (at + 30, 0.0), (at + 30 + fills, met)]
            at += 30 + fills + rng.uniform(0.5, 16) * HOUR
        tenants.append((path(points), size))
    each = rng.uniform(150, 260) * MIB / sum(size for _, size in tenants)
    return long(
        seed,
        other=lambda t: each * sum(held(t) for held, _ in tenants),
        other_in="python_objects",
        load=diurnal(4, 18),
    )


def _columnar_batches(seed: int) -> Series:
    """The prompts of a batch come as a file of columns, which is read whole: some hundred MiB. The
    pool of its library keeps a part for a while after the file is done."""
    rng = random.Random(seed)
    times = list(accumulate(rng.uniform(1.2, 7) * HOUR for _ in range(40)))
    points, batches = [(0.0, 0.0)], list[tuple[float, float]]()
    for at in times:
        size, lasts, keeps = rng.uniform(90, 380) * MIB, rng.uniform(300, 2400), rng.uniform(0, 0.4)
        goes = at + lasts + rng.uniform(300, 1500)
        points += [(at, 0.0), (at + 40, size), (at + lasts, size), (at + lasts + 5, keeps * size)]
        points += [(goes, keeps * size), (goes + 10, 0.0)]
        batches += [(at, 14.0), (at + lasts, -14.0)]
    load, batch = diurnal(4, 14), levels(batches)
    return long(
        seed, other=path(points), other_in="anonymous_other", load=lambda t: load(t) + batch(t)
    )


FAMILIES: dict[str, Build] = {
    "rolling day": _rolling_day,
    "kept lineage": _kept_lineage,
    "written back": _written_back,
    "processed pictures": _processed_pictures,
    "admitted again": _admitted_again,
    "slot checkpoints": _slot_checkpoints,
    "primitive cache": _primitive_cache,
    "uploaded files": _uploaded_files,
    "expired on access": _expired_on_access,
    "columnar batches": _columnar_batches,
}
