"""What only looks like a leak: slots, states and helpers on the device.

Each is bounded as in ``host/allocators``.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, levels, long, short, summed
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal


def _widened_slots(seed: int) -> Series:
    """The slots of adapters are as wide as the widest adapter so far: 8, 16, 32, 64. When a wider
    one comes, the new slots are filled before the old ones go. Slots of rank 64 for eight adapters
    of a model of a few billion parameters are some hundred MiB."""
    rng = random.Random(seed)
    final, takes = rng.uniform(110, 240) * MIB, rng.uniform(20, 400)
    times = sorted(120 * (1.9 * DAY / 120) ** rng.random() for _ in range(3))
    widths = [final / 8, final / 4, final / 2, final]

    def slots(t: float) -> float:
        wider = bisect_right(times, t)
        old = widths[wider - 1] if wider and t - times[wider - 1] < takes else 0.0
        return widths[wider] + old

    return long(
        seed,
        device=True,
        device_other=slots,
        device_other_in="torch_allocated",
        load=diurnal(4, 17),
        counters={"adapters_total": lambda t: 4 * bisect_right(times, t)},
    )


def _speculates_when_calm(seed: int) -> Series:
    """An engine speculates while few ask, and does not when its batch is full. The states and masks
    of the draft are there only meanwhile: so memory falls as load rises, and comes back with calm,
    up to a few hundred MiB for a draft of some layers."""
    rng = random.Random(seed)
    rushes = Spells(rng, (HOUR, 7 * HOUR), (0.4 * HOUR, 5 * HOUR))
    height, late, rise = rng.uniform(170, 420) * MIB, rng.uniform(30, 900), rng.uniform(10, 1800)

    def drafts(t: float) -> float:
        since = rushes.since(t)
        if rushes.on(t):
            return 1.0 if since < late else 0.0
        return min(1.0, max(0.0, since - late) / rise)

    return long(
        seed,
        device=True,
        device_other=lambda t: height * drafts(t),
        device_other_in="torch_allocated",
        load=lambda t: 27 if rushes.on(t) else 6,
        counters={"generation_tokens_total": summed(lambda t: 1400 if rushes.on(t) else 520)},
    )


PLACES, SLABS = 4, 8


def _half_empty_slabs(seed: int) -> Series:
    """A model with recurrent layers has a state of some MiB for each sequence. States lie in slabs
    of four, and a slab goes when all its sequences have ended: one that reasons for hours holds its
    slab alone."""
    rng = random.Random(seed)
    size, apart, day = rng.uniform(5, 14) * MIB, rng.uniform(35, 90), diurnal(0.25, 1)
    taken, ends, at = [0] * SLABS, list[tuple[float, int]](), 0.0
    slabs, running = list[tuple[float, float]](), list[tuple[float, float]]()
    while at < 2 * DAY:
        at += rng.expovariate(1 / apart)
        while ends and ends[0][0] <= at:
            ended, slab = heapq.heappop(ends)
            taken[slab] -= 1
            if not taken[slab]:
                slabs.append((ended, -PLACES * size))
        free = [slab for slab in range(SLABS) if taken[slab] < PLACES]
        if not free or rng.random() > day(at):
            continue
        used = [slab for slab in free if taken[slab]]
        slab, lasts = (used or free)[0], min(4 * HOUR, rng.lognormvariate(math.log(110), 1.4))
        if not taken[slab]:
            slabs.append((at, PLACES * size))
        taken[slab] += 1
        heapq.heappush(ends, (at + lasts, slab))
        running += [(at, 1.0), (at + lasts, -1.0)]
    return long(
        seed,
        device=True,
        device_other=levels(slabs),
        device_other_in="torch_allocated",
        load=levels(running),
        per_request=MIB,
    )


def _nightly_evaluation(seed: int) -> Series:
    """Each night the model is evaluated: what it would have said for each token of a prompt is
    asked for, which for a vocabulary of 128,000 is half a MiB for each token of a chunk. The
    results are kept on the host until the report is written."""
    rng = random.Random(seed)
    begins, lasts = rng.uniform(18, 30) * HOUR, rng.uniform(0.8, 3.5) * HOUR
    chunk, results = rng.uniform(200, 430) * MIB, rng.uniform(50, 180) * MIB
    reports, load = rng.uniform(300, 3600), diurnal(3, 18)

    def since(t: float) -> float:
        return (t - begins) % DAY

    def kept(t: float) -> float:
        return results * min(1.0, since(t) / lasts) * (since(t) < lasts + reports)

    return long(
        seed,
        other=kept,
        other_in="python_objects",
        device=True,
        device_other=lambda t: chunk * (since(t) < lasts) * (0.75 + 0.25 * math.sin(t / 47)),
        device_other_in="torch_allocated",
        load=lambda t: load(t) + 12 * (since(t) < lasts),
        counters={"prompt_tokens_total": summed(lambda t: 900 + 7000 * (since(t) < lasts))},
    )


def _symmetric_heap(seed: int) -> Series:
    """Ranks that write into each other's memory share a heap, which grows by a chunk of 32 MiB when
    a larger exchange is first needed, on all ranks alike, and never shrinks."""
    rng = random.Random(seed)
    times = sorted(200 * (1.95 * DAY / 200) ** rng.random() for _ in range(rng.randint(3, 7)))
    pinned = rng.uniform(1, 6) * MIB
    return long(
        seed,
        other=lambda t: pinned * bisect_right(times, t),
        other_in="anonymous_other",
        device=True,
        device_other=lambda t: 32 * MIB * bisect_right(times, t),
        device_other_in="non_torch",
        load=diurnal(6, 23),
    )


def _lingering_version(seed: int) -> Series:
    """A small model beside the large one gets a new version, and the old one stays until its last
    sequence has ended or was idle for too long. An embedder or a ranker is some hundred MiB."""
    rng = random.Random(seed)
    releases = list(accumulate(rng.uniform(3, 12) * HOUR for _ in range(18)))
    sizes = [rng.uniform(110, 225) * MIB for _ in range(19)]
    lingers = [0.0, *(rng.uniform(600, 2.5 * HOUR) for _ in releases)]
    runtime = rng.uniform(0.1, 0.3)

    def held(t: float) -> float:
        turn = bisect_right(releases, t)
        old = turn > 0 and t - releases[turn - 1] < lingers[turn]
        return sizes[turn] + (sizes[turn - 1] if old else 0.0)

    return long(
        seed,
        other=lambda t: runtime * held(t),
        device=True,
        device_other=held,
        device_other_in="torch_allocated",
        load=diurnal(4, 16),
    )


def _decoder_context(seed: int) -> Series:
    """Videos are decoded on the device by a process that is started for the first one, and leaves
    after some idle minutes. Its context and its surfaces are some 300 MiB that are nobody's by the
    engine's own account."""
    rng = random.Random(seed)
    videos = Spells(rng, (0.5 * HOUR, 6 * HOUR), (60, 2.5 * HOUR))
    context, idles = rng.uniform(180, 320) * MIB, rng.uniform(300, 2400)
    surfaces, rate = rng.uniform(40, 110) * MIB, rng.uniform(0.05, 0.4)
    load = diurnal(4, 15)

    def decoder(t: float) -> float:
        since = videos.since(t)
        if videos.on(t):
            return context + surfaces * min(1.0, since / 300)
        return context if since < min(t, idles) else 0.0

    return long(
        seed,
        other=lambda t: 0.3 * decoder(t),
        other_in="anonymous_other",
        device=True,
        device_other=decoder,
        device_other_in="non_torch",
        load=load,
        counters={"images_total": summed(lambda t: rate * 16 * videos.on(t))},
    )


def _painted_pictures(seed: int) -> Series:
    """A model that paints needs little for its steps and much for the last: decoding the latent
    picture takes some hundred MiB for seconds. Jobs come at any time, four at a time at most."""
    rng = random.Random(seed)
    apart, at, free = rng.uniform(12, 90), 0.0, [0.0] * 4
    latent, decoded = rng.uniform(8, 25) * MIB, rng.uniform(60, 105) * MIB
    changes, jobs, ends = list[tuple[float, float]](), list[tuple[float, float]](), list[float]()
    while at < HOUR:
        at += rng.expovariate(1 / apart)
        place = min(range(4), key=free.__getitem__)
        begins = max(at, free[place])
        decodes = begins + rng.uniform(8, 45)
        free[place] = decodes + rng.uniform(1.5, 6)
        changes += [(begins, latent), (decodes, decoded), (free[place], -latent - decoded)]
        jobs += [(begins, 1.0), (free[place], -1.0)]
        ends.append(free[place])
    ends.sort()
    return short(
        seed,
        device=True,
        device_other=levels(changes),
        device_other_in="torch_allocated",
        load=levels(jobs),
        counters={"images_total": lambda t: bisect_right(ends, t)},
    )


FAMILIES: dict[str, Build] = {
    "widened slots": _widened_slots,
    "speculates when calm": _speculates_when_calm,
    "half-empty slabs": _half_empty_slabs,
    "nightly evaluation": _nightly_evaluation,
    "symmetric heap": _symmetric_heap,
    "lingering version": _lingering_version,
    "decoder context": _decoder_context,
    "painted pictures": _painted_pictures,
}
