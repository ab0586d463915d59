"""What only looks like a leak: allocators, runtimes and kernels of the host.

Each is bounded: what it takes comes back within hours, is in the ledger, or is less than half a
budget.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, last, levels, long, path, summed
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal, flat

MINUTES = range(0, int(2 * DAY), 60)


def _ticked_decay(seed: int) -> Series:
    """Without a thread of its own, jemalloc gives dirty pages back only as it is called. What an
    evening's batch has freed stays through a night without requests, and goes with the first of
    the morning. A few MiB stay in each of some dozen arenas."""
    rng = random.Random(seed)
    batches = Spells(rng, (2 * HOUR, 7 * HOUR), (300, 1500))
    opens, closes = rng.uniform(6, 9) * HOUR, rng.uniform(16, 21) * HOUR
    height, keeps = rng.uniform(130, 280) * MIB, math.exp(-60 / rng.uniform(300, 1500))

    def load(t: float) -> float:
        return (11 if opens <= t % DAY < closes else 0) + 22 * batches.on(t)

    level, points = 0.0, []
    for at in map(float, MINUTES):
        if batches.on(at):
            level += (height - level) / 4
        elif load(at):
            level *= keeps
        points.append((at, level))
    return long(seed, malloc=False, other=path(points), load=load)


def _trimmed_by_timer(seed: int) -> Series:
    """Servers with much churn call malloc_trim from a timer. Between two calls the heap keeps ever
    more free pages, quickly at first: up to a twentieth or a tenth of its three or four GiB."""
    rng = random.Random(seed)
    calls = list(accumulate((rng.uniform(1.5, 6) * HOUR for _ in range(40)), initial=0.0))
    height, fills = rng.uniform(130, 300) * MIB, rng.uniform(0.5, 3) * HOUR
    left = [0.0, *(rng.uniform(0.05, 0.25) for _ in calls)]

    def kept(t: float) -> float:
        least = left[bisect_right(calls, t) - 1]
        return height * (1 - (1 - least) * math.exp(-(t - last(calls, t)) / fills))

    return long(seed, other=kept, other_in="retained", load=diurnal(5, 20))


def _straggling_survivors(seed: int) -> Series:
    """Python gives back an arena of a MiB when the last object in it is gone. A burst fills a
    hundred arenas, and a few objects in each belong to sessions, which end within hours."""
    rng = random.Random(seed)
    bursts = list(accumulate(rng.uniform(1.5, 8) * HOUR for _ in range(30)))
    tau, changes = rng.uniform(0.3, 1.6) * HOUR, list[tuple[float, float]]()
    for at in bursts:
        for _ in range(rng.randint(40, 140)):
            made = at + rng.uniform(0, 300)
            survivors = (rng.expovariate(1 / tau) for _ in range(rng.randint(0, 4)))
            changes += [(made, MIB), (at + 300 + max(survivors, default=0.0), -MIB)]

    def bursting(t: float) -> bool:
        done = bisect_right(bursts, t)
        return done > 0 and t - bursts[done - 1] < 300

    load = diurnal(4, 15)
    return long(
        seed,
        other=levels(changes),
        other_in="anonymous_other",
        load=lambda t: load(t) + 30 * bursting(t),
    )


def _quarter_rule(seed: int) -> Series:
    """CPython looks at its old objects when the new ones are a quarter as many. So garbage gets
    higher as the caches of its frontend fill, by a hundred MiB within half a day."""
    rng = random.Random(seed)
    every, tau = rng.uniform(500, 2600), rng.uniform(3, 12) * HOUR
    cached, weight = rng.uniform(70, 130) * MIB, rng.uniform(1.2, 2.6)

    def held(t: float) -> float:
        live = cached * (1 - math.exp(-t / tau))
        return live + weight * (200 * MIB + live) / 4 * (t % every / every)

    return long(seed, other=held, other_in="python_objects", collects=every, load=flat(11))


def _late_imports(seed: int) -> Series:
    """A module is imported when a request first needs it: tables, pictures, a parser of tool calls,
    the processor of a family of models. Such libraries are 15 to 70 MiB each, loaded and set up,
    and some are first needed on the second day."""
    rng = random.Random(seed)
    sizes = [rng.uniform(15, 70) * MIB for _ in range(rng.randint(3, 6))]
    least = min(1.0, 235 * MIB / sum(sizes))
    imports = [(60 * (1.8 * DAY / 60) ** rng.random(), least * size) for size in sizes]
    return long(seed, other=levels(imports), load=diurnal(2, 14))


def _uncommitted_regions(seed: int) -> Series:
    """A server of models in Java: its heap takes regions as soon as it needs them, and gives them
    back at the end of a concurrent cycle, which is hours away when there is little to do. Its live
    objects are 5 to 8 MiB for each request."""
    rng = random.Random(seed)
    load, each, region = diurnal(3, rng.uniform(14, 24)), rng.uniform(5, 8) * MIB, 8 * MIB
    cycles = list(accumulate(rng.uniform(0.6, 4) * HOUR for _ in range(80)))
    heap, done, points = 0.0, 0, list[tuple[float, float]]()
    for at in map(float, MINUTES):
        needed = each * load(at) * rng.uniform(1.05, 1.7)
        if bisect_right(cycles, at) > done:
            done, heap = bisect_right(cycles, at), 1.3 * each * load(at)
        heap = max(heap, needed)
        points.append((at, region * math.ceil(heap / region)))
    return long(seed, malloc=False, other=path(points), other_in="anonymous_other", load=load)


def _writer_pays(seed: int) -> Series:
    """A table in shared memory, of a hundred MiB or two, is written anew by whichever container of
    the pod leads at the time. The kernel charges each page to who touched it first."""
    rng = random.Random(seed)
    leads = Spells(rng, (1.5 * HOUR, 10 * HOUR), (HOUR, 9 * HOUR))
    size, writes = rng.uniform(100, 270) * MIB, rng.uniform(20, 900)
    grows = rng.uniform(0, 0.25)

    def paid(t: float) -> float:
        table = size * (1 + grows * t / (2 * DAY))
        return table * min(1.0, leads.since(t) / writes) * leads.on(t)

    return long(seed, other=paid, other_in="shared", load=diurnal(4, 16))


def _user_space_kernel(seed: int) -> Series:
    """In a sandbox with a kernel of its own, files that were read lie in that kernel's memory,
    which is shared memory to the host. It keeps up to some hundred MiB of weights, logs and
    libraries, and drops most of it when the node runs short."""
    rng = random.Random(seed)
    load, height = diurnal(4, 18), rng.uniform(130, 240) * MIB
    read, fills = summed(load), rng.uniform(1, 9) * HOUR * 11
    drops = [0.0, *accumulate(rng.uniform(6, 22) * HOUR for _ in range(9))]
    keeps = [0.0, *(rng.uniform(0.1, 0.5) for _ in drops)]

    def cached(t: float) -> float:
        since, least = last(drops, t), keeps[bisect_right(drops, t) - 1]
        return height * (1 - (1 - least) * math.exp(-(read(t) - read(since)) / fills))

    return long(seed, other=cached, other_in="shared", load=load)


def _traced_allocations(seed: int) -> Series:
    """Someone who looks for a leak switches on that Python records where each object was made. A
    record of ten frames is half a KiB, and there are some hundred thousand objects. All records go
    when it is switched off."""
    rng = random.Random(seed)
    traced = Spells(rng, (4 * HOUR, 13 * HOUR), (0.3 * HOUR, 2 * HOUR))
    height, tau = rng.uniform(140, 360) * MIB, rng.uniform(200, 2400)
    return long(
        seed,
        other=lambda t: height * (1 - math.exp(-traced.since(t) / tau)) * traced.on(t),
        load=diurnal(5, 17),
    )


def _pooled_buffers(seed: int) -> Series:
    """Each message takes a buffer from a pool and returns it, at the size of the largest message
    that it ever held. A message may be 4 MiB, as gRPC has it by default, and few are: the buffers
    reach that one by one, ever more slowly."""
    rng = random.Random(seed)
    buffers, apart, at = [0.0] * rng.randint(32, 56), rng.uniform(15, 200), 0.0
    changes = list[tuple[float, float]]()
    while at < 2 * DAY:
        at += rng.expovariate(1 / apart)
        size, taken = min(4.0, 0.2 * rng.paretovariate(1.1)) * MIB, rng.randrange(len(buffers))
        if size > buffers[taken]:
            changes.append((at, size - buffers[taken]))
            buffers[taken] = size
    return long(seed, other=levels(changes), load=diurnal(4, 19))


FAMILIES: dict[str, Build] = {
    "ticked decay": _ticked_decay,
    "trimmed by timer": _trimmed_by_timer,
    "straggling survivors": _straggling_survivors,
    "quarter rule": _quarter_rule,
    "late imports": _late_imports,
    "uncommitted regions": _uncommitted_regions,
    "writer pays": _writer_pays,
    "user-space kernel": _user_space_kernel,
    "traced allocations": _traced_allocations,
    "pooled buffers": _pooled_buffers,
}
