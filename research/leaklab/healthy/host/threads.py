"""What only looks like a leak: processes, their threads and heaps, and their tiers.

Each is bounded as in ``processes``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, last, long, summed
from leaklab.series import DAY, GIB, HOUR, MIB, Build, Series, diurnal


def _forked_child(seed: int) -> Series:
    """A child is forked to write a dump: what its parent changes meanwhile is there twice."""
    rng = random.Random(seed)
    children = Spells(rng, (4 * HOUR, 11 * HOUR), (600, 2700))
    height, tau = rng.uniform(240, 420) * MIB, rng.uniform(300, 1500)
    return long(
        seed,
        other=lambda t: height * (1 - math.exp(-children.since(t) / tau)) * children.on(t),
        other_in="anonymous_other",
        load=diurnal(5, 20),
    )


def _recycled_workers(seed: int) -> Series:
    """Processes that each end after so many requests, more or less, and begin anew: at first all
    are of the same age."""
    rng = random.Random(seed)
    count, every = rng.randint(3, 6), rng.uniform(1.5, 5) * HOUR
    height = rng.uniform(200, 380) * MIB / count
    begins = [
        [0.0, *accumulate(every * rng.uniform(0.75, 1.25) for _ in range(60))] for _ in range(count)
    ]

    def grown(t: float) -> float:
        return sum(t - last(those, t) for those in begins) / every

    return long(
        seed, other=lambda t: height * grown(t), other_in="anonymous_other", load=lambda t: 14
    )


THREADS = 32


def _executor_threads(seed: int) -> Series:
    """A pool starts a thread where none is idle, up to its bound, and never ends one; each keeps
    its stack and what its heap once held."""
    rng = random.Random(seed)
    each, usual = rng.uniform(4, 6.8) * MIB, rng.uniform(4, 9)
    times = list(accumulate(rng.expovariate(1 / 1500) for _ in range(300)))
    started = list(
        accumulate((min(THREADS, 1 + int(rng.expovariate(1 / usual))) for _ in times), max)
    )

    def threads(t: float) -> int:
        met = bisect_right(times, t)
        return started[met - 1] if met else 0

    return long(
        seed, other=lambda t: each * threads(t), other_in="anonymous_other", load=diurnal(3, 16)
    )


def _pinned_heap_top(seed: int) -> Series:
    """A small block above all that a burst has freed: the heap cannot shrink until it is gone."""
    rng = random.Random(seed)
    pins = [
        (at, at + rng.uniform(0.3, 5) * HOUR, rng.uniform(60, 320) * MIB)
        for at in accumulate(rng.uniform(HOUR, 9 * HOUR) for _ in range(20))
    ]

    def kept(t: float) -> float:
        held = (size * min(1.0, (t - at) / 90) for at, until, size in pins if at <= t < until)
        return max(held, default=0.0)

    return long(
        seed,
        other=kept,
        other_in="retained",
        load=lambda t: 40 if any(at <= t < at + 240 for at, _, _ in pins) else 9,
    )


def _timed_collections(seed: int) -> Series:
    """The collector is off; a timer calls it, and what it finds is as much as there was work."""
    rng = random.Random(seed)
    every, high = rng.uniform(0.7, 2.5) * HOUR, rng.uniform(16, 30)
    load = diurnal(2, high)
    worked, each = summed(load), rng.uniform(120, 330) * MIB / (every * high)
    return long(
        seed,
        other=lambda t: each * (worked(t) - worked(t - t % every)),
        other_in="python_objects",
        collects=every,
        load=load,
    )


def _radix_tree(seed: int) -> Series:
    """Its nodes get more until the KV pool is full; a change of the weights empties it."""
    rng = random.Random(seed)
    load = diurnal(4, 24)
    worked, fills = summed(load), rng.uniform(0.7, 4) * HOUR * 14
    height = rng.uniform(130, 225) * MIB
    flushes = [0.0, *accumulate(rng.uniform(5, 17) * HOUR for _ in range(12))]

    def nodes(t: float) -> float:
        since = worked(t) - worked(last(flushes, t))
        return height * (1 - math.exp(-since / fills))

    return long(seed, other=nodes, other_in="python_objects", load=load)


def _lazily_freed(seed: int) -> Series:
    """Pages that an allocator has let go count as its own until the kernel needs them."""
    rng = random.Random(seed)
    pressure = Spells(rng, (2 * HOUR, 7 * HOUR), (120, 900))
    height, tau = rng.uniform(200, 330) * MIB, rng.uniform(1, 4) * HOUR
    return long(
        seed,
        malloc=False,
        other=lambda t: (
            0.0 if pressure.on(t) else height * (1 - math.exp(-pressure.since(t) / tau))
        ),
        load=lambda t: 11,
    )


def _paced_collector(seed: int) -> Series:
    """A runtime that collects whenever its heap is twice what was alive: by day more is."""
    rng = random.Random(seed)
    load, each = diurnal(4, 24), rng.uniform(2.5, 4.8) * MIB
    # Its period is none of the samples' interval: they meet the heap at any height.
    every = rng.uniform(97, 610)
    return long(
        seed, malloc=False, other=lambda t: each * load(t) * (1 + t % every / every), load=load
    )


def _chunked_tier(seed: int) -> Series:
    """A tier that takes whole chunks and keeps them; its ledger says what they hold."""
    rng = random.Random(seed)
    bound, chunk = rng.uniform(0.7, 1.2) * GIB, rng.choice((64, 96, 128)) * MIB
    tau, turns = rng.uniform(1, 7) * HOUR, rng.uniform(1.5, 6) * HOUR

    def filled(t: float) -> float:
        return bound * (1 - math.exp(-t / tau))

    def used(t: float) -> float:
        return filled(t) * (0.96 + 0.04 * math.cos(2 * math.pi * t / turns))

    return long(
        seed,
        other=lambda t: chunk * math.ceil(filled(t) / chunk),
        other_in="anonymous_other",
        ledger=used,
        ledger_bound=int(bound),
        load=diurnal(5, 22),
    )


def _split_huge_pages(seed: int) -> Series:
    """Half used huge pages are made in the background, and split as soon as memory is short."""
    rng = random.Random(seed)
    made = Spells(rng, (0.4 * HOUR, 7 * HOUR), (0.7 * HOUR, 6 * HOUR))
    height, rise = rng.uniform(110, 230) * MIB, rng.uniform(600, 4800)
    return long(
        seed,
        other=lambda t: height * min(1.0, made.since(t) / rise) * made.on(t),
        other_in="anonymous_other",
        load=diurnal(4, 18),
    )


def _staged_downloads(seed: int) -> Series:
    """Weights come into a file system in memory, and go when they are read; the parts of a download
    that failed lie there until they are tidied up."""
    rng = random.Random(seed)
    tidied, at, files = rng.uniform(3, 6) * HOUR, 0.0, []
    while at < 2 * DAY:
        at += rng.uniform(1, 6) * HOUR
        takes, size = rng.uniform(120, 1200), rng.uniform(90, 420) * MIB
        if rng.random() < 0.3:
            failed = rng.uniform(0.2, 0.8)
            whole = at + failed * takes
            files.append((at, whole, failed * size, tidied * math.ceil(whole / tidied)))
        else:
            files.append((at, at + takes, size, at + takes + rng.uniform(60, 400)))

    def staged(t: float) -> float:
        return sum(
            size * min(1.0, (t - at) / (whole - at))
            for at, whole, size, gone in files
            if at <= t < gone
        )

    return long(seed, other=staged, other_in="shared", load=lambda t: 10)


FAMILIES: dict[str, Build] = {
    "forked child": _forked_child,
    "recycled workers": _recycled_workers,
    "executor threads": _executor_threads,
    "pinned heap top": _pinned_heap_top,
    "timed collections": _timed_collections,
    "radix tree": _radix_tree,
    "lazily freed": _lazily_freed,
    "paced collector": _paced_collector,
    "chunked tier": _chunked_tier,
    "split huge pages": _split_huge_pages,
    "staged downloads": _staged_downloads,
}
