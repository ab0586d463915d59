"""What only looks like a leak: what libraries and the kernel keep on the host.

Each is bounded: what it takes comes back within hours, is in the ledger, or is less than half a
budget.
"""

from __future__ import annotations

import math
import random
from collections import deque
from itertools import accumulate

from leaklab.healthy_runs import Spells, last, levels, long, path, summed
from leaklab.series import DAY, GIB, HOUR, LIMIT, MIB, Build, Series, diurnal


def _per_cpu_caches(seed: int) -> Series:
    """An allocator keeps a cache for each CPU. A CPU's cache fills when a thread first frees memory
    there, and the scheduler takes hours to try the far CPUs. Idle caches shrink by night."""
    rng = random.Random(seed)
    cpus, each = rng.choice((32, 48, 64, 96)), rng.uniform(1.2, 2.5) * MIB
    tried = levels([(60 * (1.8 * DAY / 60) ** rng.random(), each) for _ in range(cpus)])
    load, shrinks = diurnal(3, 21), rng.uniform(0.05, 0.25)
    return long(
        seed,
        malloc=False,
        other=lambda t: tried(t) * (1 - shrinks * (1 - load(t) / 21)),
        load=load,
    )


def _mapped_weights(seed: int) -> Series:
    """Weights are mapped from a file. The kernel reads a page when its expert is first asked for,
    and drops cold pages when other pods need memory."""
    rng = random.Random(seed)
    size = (LIMIT - 0.3 * GIB - long(seed).base) * rng.uniform(0.5, 0.95)
    experts = [rng.uniform(0.02, 20) * HOUR for _ in range(4)]
    dropped = [0.0, *accumulate(rng.uniform(5, 20) * HOUR for _ in range(10))]
    cold, again = rng.uniform(0.2, 0.6), rng.uniform(0.5, 4) * HOUR

    def read(t: float) -> float:
        met = sum(1 - math.exp(-t / tau) for tau in experts) / len(experts)
        return size * met * (1 - cold * math.exp(-(t - last(dropped, t)) / again))

    return long(seed, file=read, load=diurnal(4, 18))


def _proactive_reclaim(seed: int) -> Series:
    """A daemon of the node takes a little memory from the engine again and again, until the engine
    waits for its own pages. Then it lets go, and the pages that are needed come back."""
    rng = random.Random(seed)
    height = rng.uniform(150, 300) * MIB
    points = [(0.0, height)]
    while points[-1][0] < 2 * DAY:
        taken = points[-1][0] + rng.uniform(0.8, 6) * HOUR
        points.append((taken, height * rng.uniform(0.1, 0.5)))
        points.append((taken + rng.uniform(300, 2700), height * rng.uniform(0.85, 1)))
    return long(seed, other=path(points), other_in="anonymous_other", load=diurnal(5, 17))


def _abandoned_segments(seed: int) -> Series:
    """A thread that ends leaves its half-used segments to the allocator. A live thread adopts them
    when it needs a segment of that size, which may be hours later."""
    rng = random.Random(seed)
    gap = rng.uniform(400, 1500)
    adopted = rng.uniform(4, 11) * gap
    changes, at = [], 0.0
    while at < 2 * DAY:
        at += rng.expovariate(1 / gap)
        size = rng.uniform(4, 24) * MIB
        changes += [(at, size), (at + rng.expovariate(1 / adopted), -size)]
    return long(seed, malloc=False, other=levels(changes), load=diurnal(4, 20))


def _task_events(seed: int) -> Series:
    """Each task leaves a record of its states in a ring of a hundred thousand, for a dashboard. The
    ring fills once, as fast as there is work; from then on the oldest record goes."""
    rng = random.Random(seed)
    ring, high = rng.uniform(90, 230) * MIB, rng.uniform(12, 24)
    load = diurnal(3, high)
    worked, fills = summed(load), rng.uniform(6, 40) * HOUR * (3 + high) / 2
    return long(seed, other=lambda t: ring * min(1.0, worked(t) / fills), load=load)


def _rotated_logs(seed: int) -> Series:
    """Logs lie in a file system in memory. A full file is set aside, packed one file later, and
    removed when there are too many."""
    rng = random.Random(seed)
    full, packed, kept = rng.uniform(40, 100) * MIB, rng.uniform(0.05, 0.15), rng.randint(2, 5)
    load = diurnal(4, 24)
    worked, each = summed(load), rng.uniform(0.6, 5) * HOUR * 14

    def files(t: float) -> float:
        turn, part = divmod(worked(t) / each, 1)
        return full * (part + (turn >= 1) + packed * min(max(0.0, turn - 1), kept))

    return long(seed, other=files, other_in="shared", load=load)


def _kernel_cache_files(seed: int) -> Series:
    """Compiled kernels are cached in a file system in memory. A shape that is new adds some files,
    and new shapes get rarer."""
    rng = random.Random(seed)
    count, total = rng.randint(25, 70), rng.uniform(80, 230) * MIB
    shares = [rng.paretovariate(1.5) for _ in range(count)]
    files = levels(
        [(30 * (2 * DAY / 30) ** rng.random(), total * one / sum(shares)) for one in shares]
    )
    return long(seed, other=files, other_in="shared", load=diurnal(3, 15))


def _compacted_index(seed: int) -> Series:
    """An index of the blocks on disk: new keys fill a table in memory, which is written out when it
    is full. Each file on disk needs its filter in memory, until a compaction merges the files."""
    rng = random.Random(seed)
    table, each = rng.uniform(32, 64) * MIB, rng.uniform(8, 20) * MIB
    files, buffers = rng.randint(5, 9), rng.uniform(60, 140) * MIB
    load, compacts = diurnal(4, 20), rng.uniform(0.05, 0.2)
    worked, fills = summed(load), rng.uniform(900, 4000) * 12

    def held(t: float) -> float:
        turn, part = divmod(worked(t) / fills, 1)
        written = turn % files
        if turn and not written and part < compacts:
            return table * part + each * files + buffers
        return table * part + each * written

    return long(seed, other=held, load=load)


def _compiled_grammars(seed: int) -> Series:
    """A schema that is new is compiled, which needs much memory for some seconds. Its automaton
    stays in a cache that the engine accounts for, until younger ones need its place."""
    rng = random.Random(seed)
    bound = rng.choice((128, 256, 512)) * MIB
    releases, at = Spells(rng, (2 * HOUR, 9 * HOUR), (600, 2 * HOUR)), 0.0
    cache, cached, scratch = (
        deque[float](),
        list[tuple[float, float]](),
        list[tuple[float, float]](),
    )
    while at < 2 * DAY:
        at += rng.expovariate(1 / (60 if releases.on(at) else 1500))
        size = min(24.0, 0.5 * rng.paretovariate(0.9)) * MIB
        cache.append(size)
        cached.append((at, size))
        while sum(cache) > bound:
            cached.append((at, -cache.popleft()))
        needs = min(300 * MIB, size * rng.uniform(5, 15))
        scratch += [(at, needs), (at + rng.uniform(3, 60), -needs)]
    automata, compiling = levels(cached), levels(scratch)
    return long(
        seed,
        other=lambda t: automata(t) + min(350 * MIB, compiling(t)),
        ledger=automata,
        ledger_bound=bound,
        load=diurnal(4, 19),
    )


FAMILIES: dict[str, Build] = {
    "per-CPU caches": _per_cpu_caches,
    "mapped weights": _mapped_weights,
    "proactive reclaim": _proactive_reclaim,
    "abandoned segments": _abandoned_segments,
    "task events": _task_events,
    "rotated logs": _rotated_logs,
    "kernel cache files": _kernel_cache_files,
    "compacted index": _compacted_index,
    "compiled grammars": _compiled_grammars,
}
