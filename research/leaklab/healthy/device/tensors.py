"""What only looks like a leak: tensors, workspaces and rings on the device.

Each is bounded as in ``host/heaps``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, long, summed
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal


def _tensors_in_cycles(seed: int) -> Series:
    """A request that failed leaves its traceback in a cycle, and its tensors on the device, until
    the next full collection; they fail in flocks."""
    rng = random.Random(seed)
    outages = Spells(rng, (1.5 * HOUR, 6 * HOUR), (300, 1500))
    every, each = rng.uniform(0.7, 2.8) * HOUR, rng.uniform(1, 2.5) * MIB
    errors = summed(lambda t: 0.05 if outages.on(t) else 0.003)
    return long(
        seed,
        device=True,
        device_other=lambda t: each * (int(errors(t)) - int(errors(t - t % every))),
        device_other_in="torch_allocated",
        collects=every,
        load=diurnal(4, 19),
        counters={"errors_total": errors},
    )


def _rollouts(seed: int) -> Series:
    """A trainer's batch: its sequences end one after another, and what is to be learned from them
    is kept, until the last has ended and the trainer has learned: the engine waits for it."""
    rng = random.Random(seed)
    times, heights = [0.0], [0.0]
    lasts, learns = rng.uniform(500, 2200), rng.uniform(60, 300)
    height, sequences = rng.uniform(200, 390) * MIB, rng.choice((32, 48, 64))
    while times[-1] < 2 * DAY:
        times.append(times[-1] + lasts * rng.uniform(0.7, 1.4) + learns)
        heights.append(height * rng.uniform(0.8, 1.15))

    def ended(t: float) -> float:
        """The share of the batch's sequences: few soon, the longest late."""
        turn = bisect_right(times, t)
        x = (t - times[turn - 1]) / (times[turn] - times[turn - 1] - learns)
        return 1 - (1 - x) ** 0.6 if x < 1 else 1.0

    def kept(t: float) -> float:
        return heights[bisect_right(times, t)] * ended(t)

    return long(
        seed,
        device=True,
        device_other=kept,
        device_other_in="torch_allocated",
        load=lambda t: sequences * (1 - ended(t)),
        per_request=MIB,
    )


def _image_embeddings(seed: int) -> Series:
    """What an encoder has made of each picture stays until its place is needed: the places are all
    taken after the first hours with pictures, or on the second day."""
    rng = random.Random(seed)
    pictured = Spells(rng, (0.5 * HOUR, 6 * HOUR), (0.3 * HOUR, 3 * HOUR))
    each, places = rng.choice((2.25, 4.5, 9.0)) * MIB, rng.uniform(140, 235) * MIB
    rate = rng.uniform(0.1, 1) * places / each / (3 * HOUR)
    images = summed(lambda t: rate * pictured.on(t))
    return long(
        seed,
        device=True,
        device_other=lambda t: each * min(places // each, int(images(t))),
        device_other_in="torch_allocated",
        load=diurnal(3, 17),
        counters={"images_total": images},
    )


def _library_workspaces(seed: int) -> Series:
    """The library of matrix products takes 32 MiB for each stream from which it is first called:
    those of overlapped copies, of another batch size, of an adapter."""
    rng = random.Random(seed)
    called = sorted(40 * (2 * DAY / 40) ** rng.random() for _ in range(rng.randint(3, 7)))
    return long(
        seed,
        device=True,
        device_other=lambda t: 32 * MIB * bisect_right(called, t),
        device_other_in="torch_allocated",
        load=diurnal(5, 20),
    )


def _sampled_profiles(seed: int) -> Series:
    """A profiler of the whole fleet looks in for a minute or two, each hour or so: it has buffers
    on device and host meanwhile, and keeps the symbols that it has met."""
    rng = random.Random(seed)
    looks = Spells(rng, (1800, 5000), (40, 200))
    device, host = rng.uniform(64, 320) * MIB, rng.uniform(40, 150) * MIB
    symbols, tau = rng.uniform(50, 110) * MIB, rng.uniform(3, 12) * HOUR
    return long(
        seed,
        other=lambda t: host * looks.on(t) + symbols * (1 - math.exp(-t / tau)),
        other_in="anonymous_other",
        device=True,
        device_other=lambda t: device * looks.on(t),
        device_other_in="non_torch",
        load=diurnal(4, 21),
    )


def _new_communicators(seed: int) -> Series:
    """When a peer is lost the ranks make new rings without it: those of before stay until the last
    who waits on them has given up, and the new are larger or smaller."""
    rng = random.Random(seed)
    lost = list(accumulate(rng.uniform(3, 14) * HOUR for _ in range(20)))
    rings = [rng.uniform(150, 230) * MIB for _ in range(21)]
    gives_up, joins = rng.uniform(600, 2400), rng.uniform(30, 120)

    def since(t: float) -> float:
        done = bisect_right(lost, t)
        return t - lost[done - 1] if done else math.inf

    def held(t: float) -> float:
        made = bisect_right(lost, t)
        return rings[made] + (rings[made - 1] if since(t) < gives_up else 0.0) - rings[0]

    return long(
        seed,
        device=True,
        device_other=held,
        device_other_in="non_torch",
        load=lambda t: 0 if since(t) < joins else 16,
    )


FAMILIES: dict[str, Build] = {
    "tensors in cycles": _tensors_in_cycles,
    "rollouts": _rollouts,
    "image embeddings": _image_embeddings,
    "library workspaces": _library_workspaces,
    "sampled profiles": _sampled_profiles,
    "new communicators": _new_communicators,
}
