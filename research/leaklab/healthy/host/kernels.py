"""What only looks like a leak: allocators, runtimes and kernels of the host.

Each is bounded: what it takes comes back within hours, is in the ledger, or is less than half a
budget.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import deque
from itertools import accumulate

from leaklab.demand import between_steps, drifting, rushes, two_humps
from leaklab.healthy_runs import integral, last, levels, long
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits

MINUTE = 60.0


def _recent_peaks(seed: int) -> Series:
    """Google's allocator gives free pages back only above the demand of the last hour or two, lest
    it should ask for them again at once. Memory goes up with a rush, and down an hour after it."""
    rng = random.Random(seed)
    load = rushes(seed, rng.uniform(4, 8), rng.uniform(16, 24), (HOUR, 6 * HOUR), (300, HOUR))
    each, window = rng.uniform(6, 12) * MIB, int(rng.uniform(0.7, 2.5) * 60)
    drifts, recent, heap = drifting(seed, 1, HOUR, 0.12), deque[float](), list[float]()
    for minute in range(int(LONGEST / MINUTE) + 1):
        recent.append(each * load(minute * MINUTE) * drifts(minute * MINUTE))
        if len(recent) > window:
            recent.popleft()
        heap.append(max(recent))
    return long(
        seed,
        **habits(seed) | {"per_request": 0.3 * MIB},
        malloc=False,
        other=between_steps(heap, MINUTE),
        load=load,
    )


def _merged_pages(seed: int) -> Series:
    """A thread of the kernel merges equal pages of the engine's processes, some hundred of them a
    second. When new tables are loaded the pages are written to, and each process has its own
    again."""
    rng = random.Random(seed)
    loads = [0.0, *accumulate(rng.uniform(3, 16) * HOUR for _ in range(24))]
    height, tau = rng.uniform(150, 330) * MIB, rng.uniform(0.5, 4) * HOUR
    copies = rng.uniform(30, 900)

    def shared(t: float) -> float:
        since, turn = t - last(loads, t), bisect_right(loads, t)
        merged = 1 - math.exp(-since / tau)
        before = 1 - math.exp(-(loads[turn - 1] - loads[turn - 2]) / tau) if turn > 1 else 0.0
        return max(merged, before * (1 - since / copies)) if since < copies else merged

    return long(
        seed,
        **habits(seed),
        other=lambda t: height * (1 - shared(t)),
        other_in="anonymous_other",
        load=two_humps(3, 17, rng.uniform(0, DAY)),
    )


def _deep_stacks(seed: int) -> Series:
    """A parser calls itself for each level of a schema, and a thread's stack stays as deep as it
    ever was: up to 8 MiB. A schema comes to any of some dozen threads, and few are deep."""
    rng = random.Random(seed)
    threads = [0.0] * rng.randint(24, 64)
    limit, apart, at = min(8.0, 220 / len(threads)), rng.uniform(60, 900), 0.0
    changes = list[tuple[float, float]]()
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        depth, taken = min(limit, 0.25 * rng.paretovariate(0.9)), rng.randrange(len(threads))
        if depth > threads[taken]:
            changes.append((at, (depth - threads[taken]) * MIB))
            threads[taken] = depth
    return long(
        seed,
        **habits(seed),
        other=levels(changes),
        other_in="anonymous_other",
        load=diurnal(3, 18),
    )


def _met_tokens(seed: int) -> Series:
    """Each of some frontends keeps the text of each token that it has met, for there are at most
    some hundred thousand. Common ones are met within minutes, and rare ones on the third day."""
    rng = random.Random(seed)
    load, height = two_humps(2, 20, rng.uniform(0, DAY)), rng.uniform(90, 230) * MIB
    tokens = integral(lambda t: 60 * load(t), LONGEST)
    scale = 60 * 12 * rng.uniform(2, 20) * HOUR

    def met(t: float) -> float:
        return 1 - math.exp(-math.sqrt(tokens(t) / scale))

    return long(
        seed,
        **habits(seed),
        other=lambda t: height * met(t),
        other_in="python_objects",
        load=load,
        counters={"generation_tokens_total": tokens},
    )


def _lazy_automata(seed: int) -> Series:
    """A library of expressions builds the states of its automaton as texts need them, in a cache
    for each thread. A full cache is emptied and begins anew. All begin together, and drift apart
    with the texts that each thread gets."""
    rng = random.Random(seed)
    load, threads = diurnal(3, 22), rng.randint(6, 20)
    each, fills = rng.uniform(120, 230) * MIB / threads, rng.uniform(0.4, 5) * HOUR * 12
    worked, pace = integral(load, LONGEST), [rng.uniform(0.6, 1.5) for _ in range(threads)]

    def cached(t: float) -> float:
        done = worked(t) / fills
        return each * sum(done * one % 1 for one in pace)

    return long(seed, **habits(seed), other=cached, load=load)


def _quarantine(seed: int) -> Series:
    """A hardened allocator holds back what was freed, so that a stale pointer finds nothing new
    there. The quarantine fills once, as fast as memory is freed, and is a queue from then on."""
    rng = random.Random(seed)
    load, bound = drifting(seed, rng.uniform(6, 14), 3 * HOUR), rng.uniform(120, 230) * MIB
    freed, fills = integral(load, LONGEST), rng.uniform(2, 40) * HOUR * 10
    varies = drifting(seed + 1, 1, HOUR, 0.03)
    return long(
        seed,
        **habits(seed),
        malloc=False,
        other=lambda t: bound * min(1.0, freed(t) / fills) * varies(t),
        other_in="anonymous_other",
        load=load,
    )


def _managed_pages(seed: int) -> Series:
    """Managed memory is where it was last needed. When the device is short, the driver moves pages
    that nobody reads to the host, and takes them back when they are read again: what the device
    loses the host gains."""
    rng = random.Random(seed)
    load, tau = two_humps(3, 21, rng.uniform(0, DAY)), rng.uniform(600, 2 * HOUR)
    size, lines, moved = rng.uniform(150, 400) * MIB, list[float](), 0.0
    for minute in range(int(LONGEST / MINUTE) + 1):
        wanted = min(1.0, max(0.0, (load(minute * MINUTE) - 6) / 11))
        moved += (wanted - moved) * min(1.0, MINUTE / tau)
        lines.append(size * moved)
    out = between_steps(lines, MINUTE)
    return long(
        seed,
        **habits(seed),
        other=out,
        other_in="anonymous_other",
        device=True,
        device_other=lambda t: -out(t),
        device_other_in="non_torch",
        load=load,
    )


def _thawed_by_the_hour(seed: int) -> Series:
    """Python's old objects are frozen, so that no collection goes through them. A timer thaws and
    collects them each few hours, and until then garbage gets more with the work that is done."""
    rng = random.Random(seed)
    every, load = rng.uniform(2.5, 8) * HOUR, diurnal(4, rng.uniform(12, 20))
    worked = integral(load, LONGEST)
    each = rng.uniform(110, 220) * MIB / (every * 12)
    return long(
        seed,
        **habits(seed) | {"collects": every},
        other=lambda t: each * (worked(t) - worked(t - t % every)),
        other_in="python_objects",
        load=load,
    )


def _linear_memories(seed: int) -> Series:
    """A filter of the proxy is a program with a linear memory that only grows, to the size of the
    largest body so far: one for each of some dozen threads. After some thousand requests a thread's
    filter is made anew."""
    rng = random.Random(seed)
    held = [0.5] * rng.randint(16, 48)
    most, apart, at = min(9.0, 230 / len(held)), rng.uniform(20, 160), 0.0
    anew, changes = rng.uniform(0.002, 0.02), list[tuple[float, float]]()
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        one = rng.randrange(len(held))
        body = min(most, 0.3 * rng.paretovariate(0.9))
        size = 0.5 if rng.random() < anew else max(held[one], body)
        changes.append((at, (size - held[one]) * MIB))
        held[one] = size
    return long(
        seed,
        **habits(seed),
        other=levels([(0.0, len(held) * 0.5 * MIB), *changes]),
        other_in="anonymous_other",
        load=drifting(seed, 9, 2 * HOUR),
    )


FAMILIES: dict[str, Build] = {
    "recent peaks": _recent_peaks,
    "merged pages": _merged_pages,
    "deep stacks": _deep_stacks,
    "met tokens": _met_tokens,
    "lazy automata": _lazy_automata,
    "quarantine": _quarantine,
    "managed pages": _managed_pages,
    "thawed by the hour": _thawed_by_the_hour,
    "linear memories": _linear_memories,
}
