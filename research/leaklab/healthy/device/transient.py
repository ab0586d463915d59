"""What only looks like a leak: what comes and goes on the device.

Each is bounded as in ``host/processes``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, long, short
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal


def _defragmented(seed: int) -> Series:
    """Blocks of the pool get too small to be used again, sooner under load; at a share of them the
    engine moves its tensors together and gives the rest back."""
    rng = random.Random(seed)
    every, height = rng.uniform(2.5, 5) * HOUR, rng.uniform(260, 380) * MIB
    wave = 2 * math.pi / DAY
    return long(
        seed,
        device=True,
        device_other=lambda t: height * (((t - 0.6 * math.sin(wave * t) / wave) / every) % 1),
        load=diurnal(4, 18),
    )


def _draft_model(seed: int) -> Series:
    """Speculative decoding is switched on late: its draft model is read on the host and stays on
    the device."""
    rng = random.Random(seed)
    at, takes = rng.uniform(1, 30) * HOUR, rng.uniform(60, 200)
    size = rng.uniform(140, 235) * MIB

    def read(t: float) -> float:
        return min(1.0, max(0.0, t - at) / takes)

    return long(
        seed,
        other=lambda t: size * read(t) if read(t) < 1 else 0.06 * size,
        device=True,
        device_other=lambda t: size * read(t),
        device_other_in="torch_allocated",
        load=lambda t: 12,
    )


def _tried_kernels(seed: int) -> Series:
    """For a new shape the tuner tries kernels, with scratch memory for each, for seconds."""
    rng = random.Random(seed)
    trials, scratch = Spells(rng, (60, 500), (3, 25), HOUR), rng.uniform(200, 480) * MIB
    return short(
        seed,
        device=True,
        device_other=lambda t: scratch * (1 + math.sin(2 * t)) / 2 * trials.on(t),
        load=diurnal(4, 16, 1700),
    )


def _neighbour(seed: int) -> Series:
    """Another process on the same device has work now and then: the engine does not use what the
    device says is used."""
    rng = random.Random(seed)
    jobs = Spells(rng, (3 * HOUR, 7 * HOUR), (0.5 * HOUR, 3 * HOUR))
    height, rise = rng.uniform(250, 430) * MIB, rng.uniform(300, 1500)
    return long(
        seed,
        device=True,
        device_other=lambda t: height * min(1.0, jobs.since(t) / rise) * jobs.on(t),
        device_other_in="non_torch",
        load=diurnal(3, 20),
    )


SLOTS = 9


def _adapter_slots(seed: int) -> Series:
    """Adapters of unequal rank, loaded as they are asked for; the oldest goes when slots are full.
    Who asks first comes soon, the long tail later."""
    rng = random.Random(seed)
    times = list(accumulate(rng.uniform(300, 900 + 450 * min(n, 12)) for n in range(200)))
    totals = [0.0, *accumulate(rng.choice((8, 16, 24)) * MIB for _ in times)]

    def loaded(t: float) -> int:
        return bisect_right(times, t)

    return long(
        seed,
        device=True,
        device_other=lambda t: totals[loaded(t)] - totals[max(0, loaded(t) - SLOTS)],
        device_other_in="torch_allocated",
        counters={"adapters_total": loaded},
    )


def _sent_weights(seed: int) -> Series:
    """A trainer sends new weights each hour or two: the engine pauses, and has a bucket of them on
    the host and one on the device meanwhile."""
    rng = random.Random(seed)
    updates = Spells(rng, (HOUR, 3 * HOUR), (60, 240))
    host, device = rng.uniform(150, 300) * MIB, rng.uniform(300, 600) * MIB
    return long(
        seed,
        other=lambda t: host * updates.on(t),
        other_in="shared",
        device=True,
        device_other=lambda t: device * updates.on(t),
        load=lambda t: 0 if updates.on(t) else 14,
    )


def _elastic_pool(seed: int) -> Series:
    """The KV pool gets a chunk more for each few requests, and loses them half an hour after."""
    rng = random.Random(seed)
    rushes = Spells(rng, (3 * HOUR, 6 * HOUR), (HOUR, 2.5 * HOUR))
    chunk, chunks, rise = 96 * MIB, rng.randint(4, 7), rng.uniform(600, 2400)

    def level(t: float) -> float:
        return min(1.0, rushes.since(t) / rise) * rushes.on(t)

    def pool(t: float) -> float:
        emptied = not rushes.on(t) and rushes.since(t) < min(t, 1800)
        return chunk * chunks if emptied else chunk * math.ceil(chunks * level(t))

    return long(
        seed,
        device=True,
        device_other=pool,
        device_other_in="torch_allocated",
        load=lambda t: 6 + 5 * chunks * level(t),
    )


FAMILIES: dict[str, Build] = {
    "defragmented": _defragmented,
    "draft model": _draft_model,
    "tried kernels": _tried_kernels,
    "neighbour": _neighbour,
    "adapter slots": _adapter_slots,
    "sent weights": _sent_weights,
    "elastic pool": _elastic_pool,
}
