"""What only looks like a leak: what engines and drivers keep on the device.

Each is bounded as in ``host/libraries``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate, pairwise

from leaklab.healthy_runs import Spells, levels, long, short, summed
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal

LIMBO = 1000


def _limbo_blocks(seed: int) -> Series:
    """Tensors of pictures are handed to another process, which says when it has read them. The
    sender looks for that only when a thousand of them wait."""
    rng = random.Random(seed)
    pictured = Spells(rng, (0.4 * HOUR, 5 * HOUR), (0.5 * HOUR, 4 * HOUR))
    each, rate = rng.uniform(0.15, 0.4) * MIB, rng.uniform(0.1, 0.9)
    images = summed(lambda t: rate * pictured.on(t))
    return long(
        seed,
        device=True,
        device_other=lambda t: each * (int(images(t)) % LIMBO),
        device_other_in="torch_allocated",
        load=diurnal(4, 16),
        counters={"images_total": images},
    )


def _lazy_channels(seed: int) -> Series:
    """The collective library connects two ranks when one first sends to the other, with buffers on
    the device and pinned ones on the host. Experts that are seldom asked for connect late."""
    rng = random.Random(seed)
    peers = rng.choice((7, 15, 31))
    each = rng.uniform(80, 240) * MIB / peers
    met = levels([(100 * (1.9 * DAY / 100) ** rng.random(), each) for _ in range(peers)])
    pinned = rng.uniform(0.1, 0.5)
    return long(
        seed,
        other=lambda t: pinned * met(t),
        other_in="anonymous_other",
        device=True,
        device_other=met,
        device_other_in="non_torch",
        load=diurnal(5, 22),
    )


def _requantized(seed: int) -> Series:
    """New weights are quantized layer by layer. What their full precision needed stays in the
    allocator's pool, until the engine empties the pool in a lull."""
    rng = random.Random(seed)
    kept = Spells(rng, (0.5 * HOUR, 4 * HOUR), (0.3 * HOUR, 3 * HOUR))
    height, takes = rng.uniform(180, 420) * MIB, rng.uniform(60, 300)
    load = diurnal(5, 19)

    def updates(t: float) -> bool:
        return kept.on(t) and kept.since(t) < takes

    return long(
        seed,
        device=True,
        device_other=lambda t: height * min(1.0, kept.since(t) / takes) * kept.on(t),
        load=lambda t: 0 if updates(t) else load(t),
    )


def _voice_calls(seed: int) -> Series:
    """A call to a voice model holds the states of all that was said in it, and gives them back when
    the caller hangs up: after minutes, seldom after an hour and a half."""
    rng = random.Random(seed)
    high, rate = rng.uniform(0.015, 0.035), rng.uniform(0.6, 1.8) * MIB / 60
    day = diurnal(0.15 * high, high)
    at, begins, calls, begun = 0.0, list[float](), [(0.0, 0.0)], [(0.0, 0.0)]
    while at < 2 * DAY:
        at += rng.expovariate(high)
        if rng.random() < day(at) / high:
            ends = at + min(5400.0, rng.lognormvariate(math.log(330), 0.9))
            begins.append(at)
            calls += [(at, 1.0), (ends, -1.0)]
            begun += [(at, at), (ends, -at)]
    count, since = levels(calls), levels(begun)
    return long(
        seed,
        device=True,
        device_other=lambda t: rate * max(0.0, t * count(t) - since(t)),
        device_other_in="torch_allocated",
        load=lambda t: 2 + count(t),
        counters={"audios_total": lambda t: bisect_right(begins, t)},
    )


def _stream_ordered_pool(seed: int) -> Series:
    """Memory that is freed in a stream's order goes to a pool of the driver. The pool keeps what
    the highest burst needed, and gives all above a threshold back when the device is idle."""
    rng = random.Random(seed)
    bursts = [
        (at, rng.uniform(60, 400) * MIB)
        for at in accumulate(rng.uniform(0.1, 1.6) * HOUR for _ in range(60))
    ]
    idle = Spells(rng, (1.5 * HOUR, 8 * HOUR), (120, 900))
    threshold, load = rng.uniform(20, 80) * MIB, diurnal(6, 18)
    lulls = [t for t in map(float, range(0, int(2 * DAY), 30)) if idle.on(t)]
    level, changes = 0.0, list[tuple[float, float]]()
    for at, needed in sorted([*bursts, *((at, 0.0) for at in lulls)]):
        after = max(level, needed) if needed else min(level, threshold)
        changes.append((at, after - level))
        level = after
    times = [at for at, _ in bursts]

    def bursting(t: float) -> bool:
        done = bisect_right(times, t)
        return done > 0 and t - times[done - 1] < 180

    return long(
        seed,
        device=True,
        device_other=levels(changes),
        device_other_in="non_torch",
        load=lambda t: 0 if idle.on(t) else load(t) + 14 * bursting(t),
    )


PLACES = 2


def _models_on_demand(seed: int) -> Series:
    """Small models beside the large one, to embed or to rank. A model is read when it is asked for,
    and leaves when it was not used for a while; two have a place at a time."""
    rng = random.Random(seed)
    models = [
        (rng.uniform(80, 200) * MIB, Spells(rng, (HOUR, 8 * HOUR), (900, 2.5 * HOUR)))
        for _ in range(rng.randint(3, 5))
    ]
    runtime, reads = rng.uniform(0.1, 0.3), rng.uniform(20, 90)

    def held(t: float) -> list[tuple[float, float]]:
        return [(size, asked.since(t)) for size, asked in models if asked.on(t)][:PLACES]

    return long(
        seed,
        other=lambda t: sum(size if since < reads else runtime * size for size, since in held(t)),
        device=True,
        device_other=lambda t: sum(size * min(1.0, since / reads) for size, since in held(t)),
        device_other_in="torch_allocated",
        load=diurnal(4, 17),
    )


def _retried_allocations(seed: int) -> Series:
    """The device is nearly full. When the allocator cannot have a block, it gives back all that it
    keeps and asks again, and the step waits for that."""
    rng = random.Random(seed)
    height, waits = rng.uniform(150, 450) * MIB, rng.uniform(1.5, 5)
    retries = list(accumulate((rng.uniform(90, 800) for _ in range(45)), initial=0.0))
    tops = [rng.uniform(0.7, 1) * height for _ in pairwise(retries)]

    def kept(t: float) -> float:
        turn = bisect_right(retries, t) - 1
        part = (t - retries[turn]) / (retries[turn + 1] - retries[turn])
        return tops[turn] * math.pow(part, 0.7)

    return short(
        seed,
        device=True,
        device_other=kept,
        paused=lambda t: t > waits and t - retries[bisect_right(retries, t) - 1] < waits,
        load=diurnal(14, 28, 2600),
    )


FAMILIES: dict[str, Build] = {
    "limbo blocks": _limbo_blocks,
    "lazy channels": _lazy_channels,
    "requantized": _requantized,
    "voice calls": _voice_calls,
    "stream-ordered pool": _stream_ordered_pool,
    "models on demand": _models_on_demand,
    "retried allocations": _retried_allocations,
}
