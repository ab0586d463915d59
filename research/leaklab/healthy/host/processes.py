"""What only looks like a leak: what processes keep in the host's memory.

Each is bounded: what it takes comes back within hours, is in the ledger, or is less than half a
budget.
"""

from __future__ import annotations

import math
import random

from leaklab.healthy_runs import Spells, ledgered, long, short
from leaklab.series import DAY, GIB, HOUR, MIB, Build, Series, diurnal


def _purged_when_idle(seed: int) -> Series:
    """An allocator that gives back what a burst has left, a little each second."""
    rng = random.Random(seed)
    those = Spells(rng, (HOUR, 4 * HOUR), (300, 1200))
    height, tau = rng.uniform(150, 280) * MIB, rng.uniform(300, 1200)

    def kept(t: float) -> float:
        since = those.since(t)
        return height * (min(1.0, since / 60) if those.on(t) else math.exp(-since / tau))

    return long(seed, other=kept, other_in="retained", load=lambda t: 8 + 32 * those.on(t))


LABELS = 120


def _label_sets(seed: int) -> Series:
    """Metrics keep a child for each set of labels; some tenants are met on the second day first."""
    rng = random.Random(seed)
    power, height = rng.uniform(0.9, 1.4), rng.uniform(140, 230) * MIB
    rarest = 2.5 / rng.uniform(16 * HOUR, 36 * HOUR)
    rates = [rarest * (LABELS / rank) ** power for rank in range(1, LABELS + 1)]

    def met(t: float) -> float:
        return 1 - sum(math.exp(-rate * t) for rate in rates) / LABELS

    return long(
        seed, other=lambda t: height * met(t), other_in="python_objects", load=diurnal(4, 24)
    )


def _profiled(seed: int) -> Series:
    """Someone profiles: events fill a ring of fixed size, and are freed when they are written."""
    rng = random.Random(seed)
    sessions = Spells(rng, (7 * HOUR, 15 * HOUR), (1800, 7200))
    ring, fills = rng.uniform(200, 330) * MIB, rng.uniform(900, 3600)
    return long(
        seed, other=lambda t: ring * min(1.0, sessions.since(t) / fills) if sessions.on(t) else 0.0
    )


def _reloaded_tokenizer(seed: int) -> Series:
    """The new one is read beside the old, which goes with its last request; the heap keeps some."""
    rng = random.Random(seed)
    reloads = Spells(rng, (3 * HOUR, 9 * HOUR), (120, 600))
    size, hole = rng.uniform(70, 130) * MIB, rng.uniform(15, 40) * MIB
    return long(
        seed,
        other=lambda t: size * reloads.on(t) + hole * (reloads.since(t) < t),
        load=lambda t: 10,
    )


def _swapped_at_night(seed: int) -> Series:
    """What nobody touches goes to the swap by night, and is all back soon after the first users."""
    rng = random.Random(seed)
    evening, morning = rng.uniform(19, 23) * HOUR, rng.uniform(5, 9) * HOUR
    height, tau = rng.uniform(180, 280) * MIB, rng.uniform(200, 900)
    night = (morning - evening) % DAY

    def swapped(t: float) -> float:
        since = (t - evening) % DAY
        gone = 1 - math.exp(-min(since, night) / (3 * HOUR))
        return height * gone * math.exp(-max(0.0, since - night) / tau)

    return long(
        seed,
        other=lambda t: height - swapped(t),
        other_in="anonymous_other",
        load=lambda t: 1 if (t - evening) % DAY < night else 15,
    )


def _deferred_frees(seed: int) -> Series:
    """What was unlinked is freed at the next moment at which no thread can still hold it."""
    rng = random.Random(seed)
    moments = Spells(rng, (0.5 * HOUR, 5 * HOUR), (0.5 * HOUR, 5 * HOUR))
    rate = rng.uniform(25, 45) * MIB / HOUR
    return long(seed, other=lambda t: rate * moments.since(t))


def _pinned_pool(seed: int) -> Series:
    """Pinned buffers are rounded up to powers of two, cached, and never unpinned: each larger
    transfer than any before adds as much as all before it."""
    rng = random.Random(seed)
    first = rng.uniform(5, 7.5) * MIB
    larger = sorted(rng.uniform(0.005, 0.9) * 2 * DAY for _ in range(5))
    return long(
        seed,
        other=lambda t: first * (2 ** sum(at <= t for at in larger) - 1),
        other_in="anonymous_other",
        load=diurnal(5, 18),
    )


def _bounded_by_count(seed: int) -> Series:
    """A cache of so many entries, whose size follows what the day's users ask."""
    rng = random.Random(seed)
    height, tau = rng.uniform(120, 170) * MIB, rng.uniform(0.5, 2) * HOUR
    slow, quick = rng.uniform(11, 17) * HOUR, rng.uniform(2, 5) * HOUR
    phase = rng.uniform(0, 2 * math.pi)

    def mix(t: float) -> float:
        wave = 2 * math.pi * t
        return 1 + 0.2 * math.sin(wave / slow + phase) + 0.08 * math.sin(wave / quick)

    return long(
        seed,
        other=lambda t: height * (1 - math.exp(-t / tau)) * mix(t),
        other_in="python_objects",
    )


def _prompt_cache(seed: int) -> Series:
    """It is read from a store at the start; when full, its oldest sixth goes at once."""
    rng = random.Random(seed)
    bound, fills = rng.uniform(0.8, 1.1) * GIB, rng.uniform(1200, 4200)
    turns = rng.uniform(900, 4000)

    def filled(t: float) -> float:
        return t / fills if t < fills else 5 / 6 + (t - fills) % turns / turns / 6

    return ledgered(long, seed, lambda t: bound * filled(t), bound, load=diurnal(6, 22))


def _late_accounts(seed: int) -> Series:
    """A cache that counts itself at times only: its ledger is up to an hour old."""
    rng = random.Random(seed)
    rate, every = rng.uniform(40, 85) * MIB / HOUR, rng.uniform(1200, 3600)
    bound = rng.uniform(600, 900) * MIB

    def cached(t: float) -> float:
        return min(bound, rate * t)

    return long(seed, other=cached, ledger=lambda t: cached(t - t % every), ledger_bound=int(bound))


def _pink_noise(seed: int) -> Series:
    """As unsteady over hours as over minutes."""
    rng = random.Random(seed)
    waves = [
        (rng.uniform(12, 20) * MIB, 2 * math.pi / (rng.uniform(100, 140) * 2**octave), rng.random())
        for octave in range(9)
    ]
    return long(
        seed,
        other=lambda t: sum(h * math.sin(wave * t + 2 * math.pi * at) for h, wave, at in waves),
        noise=12 * MIB,
    )


def _large_requests(seed: int) -> Series:
    """Few requests hold most of the memory: sizes by a power law, each for up to a minute."""
    rng = random.Random(seed)
    at, those = 0.0, list[tuple[float, float, float]]()
    while at < HOUR:
        at += rng.expovariate(1 / 60)
        size = min(220 * MIB, 20 * MIB / max(0.01, rng.random()) ** 0.7)
        those.append((at, at + rng.uniform(5, 60), size))

    def held(t: float) -> float:
        return min(350.0 * MIB, sum(size for at, until, size in those if at <= t < until))

    return short(seed, other=held, noise=15 * MIB)


FAMILIES: dict[str, Build] = {
    "purged when idle": _purged_when_idle,
    "label sets": _label_sets,
    "profiled": _profiled,
    "reloaded tokenizer": _reloaded_tokenizer,
    "swapped at night": _swapped_at_night,
    "deferred frees": _deferred_frees,
    "pinned pool": _pinned_pool,
    "bounded by count": _bounded_by_count,
    "prompt cache": _prompt_cache,
    "late accounts": _late_accounts,
    "pink noise": _pink_noise,
    "large requests": _large_requests,
}
