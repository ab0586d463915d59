"""What only looks like a leak or a hang: engines that do not answer at times.

Where only the status is silent, the serving port answers; where the frontend is unresponsive, it
is so for seconds, or it loads its model and has not opened its port yet.
"""

from __future__ import annotations

import math
import random

from leaklab.healthy_runs import Spells, ledgered, long, short
from leaklab.series import GIB, HOUR, MIB, Build, Series, diurnal, square_load


def _busy_event_loop(seed: int) -> Series:
    """Under a rush the status is late for many minutes; the rush is not seen, but its memory is."""
    rushes = Spells(random.Random(seed), (2 * HOUR, 6 * HOUR), (600, 2700))
    day = diurnal(4, 34)
    return long(
        seed, silent=rushes.on, load=lambda t: day(t) + 14 * rushes.on(t), per_request=3 * MIB
    )


def _throttled(seed: int) -> Series:
    """Out of its share of the CPU the engine answers now and then only, for up to an hour."""
    rng = random.Random(seed)
    spells = Spells(rng, (3 * HOUR, 6 * HOUR), (1200, 3600))
    gaps = Spells(rng, (20, 120), (60, 600))
    return long(
        seed,
        silent=lambda t: spells.on(t) and gaps.on(t),
        load=diurnal(3, 20),
    )


def _rotated_credentials(seed: int) -> Series:
    """Who asks for the status is refused at first, and once more later, while a cache fills."""
    rng = random.Random(seed)
    opened, rotated = rng.uniform(1200, 3000), rng.uniform(10 * HOUR, 36 * HOUR)
    lasts, tau = rng.uniform(0.6, 1.0) * HOUR, rng.uniform(1200, 3600)
    return ledgered(
        long,
        seed,
        lambda t: min(0.45 * GIB, 100 * MIB * math.log1p(t / tau)),
        GIB / 2,
        silent=lambda t: t < opened or rotated <= t < rotated + lasts,
    )


def _stuttering_status(seed: int) -> Series:
    spells = Spells(random.Random(seed), (300, 700), (150, 500), HOUR)
    return short(seed, silent=spells.on, load=square_load(2, 24, 800))


def _unresponsive_moments(seed: int) -> Series:
    """A full collection or a throttled CPU: nobody is answered for some seconds, and the status is
    the last to come back."""
    spells = Spells(random.Random(seed), (120, 500), (15, 60), HOUR)

    def unresponsive(t: float) -> bool:
        since = spells.since(t)
        return spells.on(t) and since < 2 + (t - since) % 10

    return short(seed, silent=spells.on, unresponsive=unresponsive)


def _cold_loads(seed: int) -> Series:
    """The port opens when the model is loaded, at the start and after a restart."""
    rng = random.Random(seed)
    restarts, opens = rng.uniform(1500, 2200), rng.uniform(150, 540)

    def age(t: float) -> float:
        return t if t < restarts else t - restarts

    return short(
        seed,
        epoch=lambda t: 1 + (t >= restarts),
        unresponsive=lambda t: age(t) < opens,
        load=lambda t: 0 if age(t) < opens else 9,
        other=lambda t: 250 * MIB * min(1.0, age(t) / opens),
    )


FAMILIES: dict[str, Build] = {
    "busy event loop": _busy_event_loop,
    "throttled": _throttled,
    "rotated credentials": _rotated_credentials,
    "stuttering status": _stuttering_status,
    "deaf moments": _unresponsive_moments,
    "cold loads": _cold_loads,
}
