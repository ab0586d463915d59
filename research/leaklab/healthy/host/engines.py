"""What only looks like a leak: what engines keep, collect and fill.

Each is bounded: what it takes comes back, has a bound in the ledger, or is less than half a budget.
"""

from __future__ import annotations

import math
import random

from leaklab.healthy_runs import between, ledgered, long, short
from leaklab.series import DAY, GIB, HOUR, LIMIT, MIB, Build, Curve, Series, diurnal, sawtooth

Bursts = list[tuple[float, float]]
"""When each begins, and how high it is, up to one."""


def bursts(rng: random.Random, count: int) -> Bursts:
    return [(rng.uniform(0.02, 0.95) * 2 * DAY, rng.random()) for _ in range(count)]


def record(those: Bursts, t: float, since: float = 0.0) -> float:
    """The highest so far: records come ever more rarely."""
    return max((height for at, height in those if since <= at <= t), default=0.0)


def under_way(those: Bursts, t: float, lasts: float) -> float:
    return max((height for at, height in those if at <= t < at + lasts), default=0.0)


def _three_generations(seed: int) -> Series:
    every = between(seed, 1.5 * HOUR, 5 * HOUR)
    young, middle = sawtooth(25 * MIB, every / 100), sawtooth(55 * MIB, every / 10)
    old = sawtooth(140 * MIB, every)
    return long(
        seed,
        other=lambda t: young(t) + middle(t) + old(t),
        other_in="python_objects",
        collects=every,
    )


def _collected_when_idle(seed: int) -> Series:
    """The collector is off under load; the engine collects by hand in a lull."""
    every = between(seed, 5 * HOUR, 8 * HOUR)
    return long(
        seed,
        other=sawtooth(200 * MIB, every),
        other_in="python_objects",
        collects=every,
        load=lambda t: 0 if t % every > every - 240 else 9,
    )


def _record_bursts(seed: int) -> Series:
    """The allocator keeps what the highest burst so far has needed."""
    rng = random.Random(seed)
    those, height = bursts(rng, 40), rng.uniform(150, 220) * MIB
    return long(
        seed,
        other=lambda t: height * record(those, t),
        other_in="retained",
        load=lambda t: 6 + 50 * under_way(those, t, 900),
    )


def _media_arena(seed: int) -> Series:
    """Shared memory by which pictures are handed over: it is used again, and grows at a record."""
    those = bursts(random.Random(seed), 50)
    return long(
        seed,
        other=lambda t: MIB * (150 * record(those, t) + 60 * under_way(those, t, 1200)),
        other_in="shared",
        load=lambda t: 8 + 12 * under_way(those, t, 1200),
    )


def _longest_prompts(seed: int) -> Series:
    """Workspace on the device for the longest prompt so far, given back now and then."""
    rng = random.Random(seed)
    those, every = bursts(rng, 60), rng.uniform(9 * HOUR, 15 * HOUR)
    return long(
        seed, device=True, device_other=lambda t: 220 * MIB * record(those, t, t - t % every)
    )


def _logarithmic_cache(seed: int) -> Series:
    """A prefix that is new gets ever rarer."""
    height, tau = between(seed, 140, 190) * MIB, between(seed, 300, 1500)
    return ledgered(long, seed, lambda t: min(0.95 * GIB, height * math.log1p(t / tau)), GIB)


def _counted_by_payload(seed: int) -> Series:
    """A cache by a power law that counts what its entries hold, and not what they are held in."""
    power = between(seed, 0.4, 0.65)
    payload: Curve = lambda t: min(640 * MIB, 500 * MIB * (t / DAY) ** power)  # noqa: E731
    return long(seed, other=lambda t: 1.2 * payload(t), ledger=payload, ledger_bound=int(640 * MIB))


def _doubling_table(seed: int) -> Series:
    first = between(seed, 0.8 * HOUR, 2 * HOUR)
    return ledgered(
        long, seed, lambda t: 24 * MIB * 2.0 ** min(5, int(math.log2(1 + t / first))), 800 * MIB
    )


def _uncounted_cache(seed: int) -> Series:
    """Of an engine that says nothing about its memory."""
    tau, height = between(seed, 2 * HOUR, 6 * HOUR), between(seed, 140, 230) * MIB
    return long(seed, malloc=False, other=lambda t: height * (1 - (1 + t / tau) ** -0.8))


def _huge_pages(seed: int) -> Series:
    """The kernel makes huge pages of half used ones, slowly, until all are: too slow to spend a
    budget within its window."""
    rate = between(seed, 8, 14) * MIB / HOUR
    return long(seed, other=lambda t: min(180 * MIB, rate * t), other_in="anonymous_other")


def _log_buffers(seed: int) -> Series:
    """They are flushed when they are full: often by day, seldom at night."""
    every = between(seed, 2 * HOUR, 6 * HOUR)
    wave = 2 * math.pi / DAY
    return long(
        seed,
        other=lambda t: 130 * MIB * (((t - 0.8 * math.sin(wave * t) / wave) / every) % 1),
        load=diurnal(2, 20),
    )


def _page_cache(seed: int) -> Series:
    """Files that were read fill the group up to its limit; the kernel takes some back."""
    rng = random.Random(seed)
    room = LIMIT - 0.3 * GIB - long(seed).base
    rate, every = rng.uniform(0.1, 1.0) * GIB / HOUR, rng.uniform(2 * HOUR, 9 * HOUR)
    return long(
        seed,
        file=lambda t: min(room, rate * t) * (0.7 if t % every < 1800 else 1.0),
        load=diurnal(4, 20),
    )


FAMILIES: dict[str, Build] = {
    "slow noise": lambda seed: long(
        seed, noise=70 * MIB, wander_s=between(seed, 1.5 * HOUR, 4 * HOUR)
    ),
    "choppy noise": lambda seed: short(
        seed, noise=90 * MIB, wander_s=between(seed, 3, 8), load=diurnal(1, 24, 700)
    ),
    "three generations": _three_generations,
    "collected when idle": _collected_when_idle,
    "record bursts": _record_bursts,
    "media arena": _media_arena,
    "longest prompts": _longest_prompts,
    "logarithmic cache": _logarithmic_cache,
    "counted by payload": _counted_by_payload,
    "doubling table": _doubling_table,
    "uncounted cache": _uncounted_cache,
    "huge pages": _huge_pages,
    "log buffers": _log_buffers,
    "page cache": _page_cache,
}
