"""What only looks like a leak: heaps, pages and stores of the host.

Each is bounded: what it takes comes back within hours, is in the ledger, or is less than half a
budget.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, last, ledgered, long, path, summed
from leaklab.series import DAY, GIB, HOUR, MIB, Build, Series, diurnal, flat, sawtooth


def _incremental_collector(seed: int) -> Series:
    """A collector that goes through the heap in small parts: garbage grows until its pass comes by,
    goes bit by bit, and no full collection is ever counted."""
    rng = random.Random(seed)
    points, height = [(0.0, 0.0)], rng.uniform(140, 280) * MIB
    while points[-1][0] < 2 * DAY:
        grown = points[-1][0] + rng.uniform(0.5, 3) * HOUR
        points.append((grown, height * rng.uniform(0.7, 1.1)))
        points.append((grown + rng.uniform(0.2, 1.2) * HOUR, height * rng.uniform(0, 0.15)))
    return long(
        seed,
        other=path(points),
        other_in="python_objects",
        collects=math.inf,
        load=diurnal(6, 18),
    )


def _resized_pod(seed: int) -> Series:
    """The pod is given CPUs as it has work, without a restart: the thread pools follow, each thread
    with scratch memory of its own."""
    rng = random.Random(seed)
    load, cores = diurnal(3, rng.uniform(22, 32)), 8
    late, each = rng.uniform(300, 4000), rng.uniform(4, 9) * MIB
    return long(
        seed,
        other=lambda t: each * cores * math.ceil(load(max(0.0, t - late)) / cores),
        other_in="anonymous_other",
        load=load,
    )


def _suffix_trees(seed: int) -> Series:
    """Speculation from what a request has said so far: its tree grows with each token, for an hour
    of reasoning, and goes with it."""
    rng = random.Random(seed)
    begins = accumulate(rng.expovariate(1 / 1100) for _ in range(250))
    those = [
        (at, at + rng.uniform(600, 5000), rng.uniform(30, 75) * MIB / HOUR)
        for at in begins
        if at % DAY > 6 * HOUR or rng.random() < 0.3
    ]
    return long(
        seed,
        other=lambda t: sum(rate * (t - at) for at, until, rate in those if at <= t < until),
        load=lambda t: 5 + sum(at <= t < until for at, until, _ in those),
    )


def _unshared_pages(seed: int) -> Series:
    """Workers that were forked from a warm parent: a page is copied when its worker first writes to
    it, be it a count of references, and again for the worker that comes after."""
    rng = random.Random(seed)
    count = rng.randint(3, 6)
    shared = rng.uniform(130, 235) * MIB / count
    workers = [
        (
            rng.uniform(0.5, 7) * HOUR,
            [0.0, *accumulate(rng.uniform(8, 40) * HOUR for _ in range(6))],
        )
        for _ in range(count)
    ]

    def copied(t: float) -> float:
        ages = ((tau, t - last(begins, t)) for tau, begins in workers)
        return shared * sum(1 - math.exp(-age / tau) for tau, age in ages)

    return long(seed, other=copied, other_in="anonymous_other", load=diurnal(4, 15))


def _raised_threshold(seed: int) -> Series:
    """The C library maps large blocks by themselves, until it has raised the size from which it
    does: what the bursts take lies in the heap from then on, and stays there after them."""
    rng = random.Random(seed)
    bursts = Spells(rng, (HOUR, 5 * HOUR), (120, 900))
    raised, height = rng.uniform(5, 36) * HOUR, rng.uniform(140, 235) * MIB

    def kept(t: float) -> float:
        ended = not bursts.on(t) and t - bursts.since(t) >= raised
        return height if ended else 0.0

    return long(
        seed,
        other=kept,
        other_in="retained",
        load=lambda t: 8 + 30 * bursts.on(t),
        per_request=height / 30,
    )


def _settling_heap(seed: int) -> Series:
    """Holes between blocks that live for long: ever fewer are made, some close in quiet hours."""
    rng = random.Random(seed)
    power, height = rng.uniform(0.3, 0.65), rng.uniform(150, 230) * MIB
    load, closes = diurnal(4, 22), rng.uniform(0.03, 0.12)
    return long(
        seed,
        other=lambda t: height * (t / (2 * DAY)) ** power * (1 - closes * (1 - load(t) / 22)),
        other_in="retained",
        load=load,
    )


def _spilled_objects(seed: int) -> Series:
    """A store of results in shared memory: at four fifths of its bound it writes the oldest to a
    disk, many at once."""
    rng = random.Random(seed)
    full, load = rng.uniform(260, 390) * MIB, diurnal(5, 22)
    spilled = full * rng.uniform(0.4, 0.7)
    worked, each = summed(load), spilled / (rng.uniform(0.5, 2.5) * HOUR * 13)

    def stored(t: float) -> float:
        put = each * worked(t)
        return put if put < full else full - spilled + (put - full) % spilled

    return long(seed, other=stored, other_in="shared", load=load)


def _metric_files(seed: int) -> Series:
    """Each process that counts has a file in memory, and leaves it when it ends; a job each night
    adds up those of the dead, and removes them."""
    rng = random.Random(seed)
    each, night = rng.uniform(1.5, 4) * MIB, rng.uniform(0, DAY)
    ends = list(accumulate(rng.expovariate(1 / rng.uniform(1700, 3200)) for _ in range(200)))

    def files(t: float) -> int:
        return bisect_right(ends, t) - bisect_right(ends, t - (t - night) % DAY)

    return long(seed, other=lambda t: each * files(t), other_in="shared", load=diurnal(3, 14))


def _touched_lazily(seed: int) -> Series:
    """A pool that its ledger counts whole from the start: the kernel gives its pages when they are
    first written, hours later."""
    rng = random.Random(seed)
    load, size = diurnal(3, 16), rng.uniform(150, 245) * MIB
    worked, touches = summed(load), rng.uniform(1, 9) * HOUR * 9
    return long(
        seed,
        other=lambda t: size * (1 - math.exp(-worked(t) / touches)),
        other_in="anonymous_other",
        ledger=flat(size),
        ledger_bound=int(size),
        load=load,
    )


def _hosted_blocks(seed: int) -> Series:
    """A store of all engines puts its blocks where there is room: here, where hardly anybody asks
    for anything. They go when their leases end."""
    rng = random.Random(seed)
    points = [(0.0, 0.0)]
    while points[-1][0] < 2 * DAY:
        at = points[-1][0] + rng.uniform(0.2, 4) * HOUR
        points.append((at, rng.uniform(0.05, 0.95) * GIB))
    return ledgered(
        long, seed, path(points), GIB, other_in="anonymous_other", load=lambda t: 2 * (t % 900 < 90)
    )


CPUS, UNCOUNTED = 72, 9 * MIB
"""A CPU may keep twice as many pages of 64 KiB to itself as there are CPUs."""


def _uncounted_pages(seed: int) -> Series:
    """The kernel counts a process's pages on each CPU and adds them up at times: what is read is
    wrong by what the CPUs have not told, as threads move between them."""
    rng = random.Random(seed)
    told, untold = [rng.uniform(-1, 1) for _ in range(CPUS)], [0.0]
    times = list(accumulate(rng.expovariate(1 / rng.uniform(20, 90)) for _ in range(9000)))
    for _ in times:
        cpu, now = rng.randrange(CPUS), rng.uniform(-1, 1)
        untold.append(untold[-1] + UNCOUNTED * (now - told[cpu]))
        told[cpu] = now
    return long(
        seed,
        other=lambda t: untold[bisect_right(times, t)],
        other_in="anonymous_other",
        noise=12 * MIB,
        load=diurnal(4, 18),
    )


def _beating_collectors(seed: int) -> Series:
    """The ranks of one engine collect in nearly the same time: they begin together, drift apart,
    and meet again after hours."""
    rng = random.Random(seed)
    count, period = rng.choice((4, 8)), rng.uniform(300, 1000)
    height = rng.uniform(160, 300) * MIB / count
    ranks = [sawtooth(height, period * rng.uniform(0.97, 1.03)) for _ in range(count)]
    return long(
        seed,
        other=lambda t: sum(garbage(t) for garbage in ranks),
        other_in="python_objects",
        collects=1.03 * period,
        load=flat(12),
    )


FAMILIES: dict[str, Build] = {
    "incremental collector": _incremental_collector,
    "resized pod": _resized_pod,
    "suffix trees": _suffix_trees,
    "unshared pages": _unshared_pages,
    "raised threshold": _raised_threshold,
    "settling heap": _settling_heap,
    "spilled objects": _spilled_objects,
    "metric files": _metric_files,
    "touched lazily": _touched_lazily,
    "hosted blocks": _hosted_blocks,
    "uncounted pages": _uncounted_pages,
    "beating collectors": _beating_collectors,
}
