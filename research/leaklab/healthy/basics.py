"""What only looks like a leak: noise, garbage, caches, loads and restarts."""

from __future__ import annotations

import math
import random

from leaklab.healthy_runs import between, ledgered, long, short
from leaklab.series import (
    DAY,
    GIB,
    HOUR,
    MIB,
    Build,
    Curve,
    Series,
    diurnal,
    flat,
    high_water,
    saturating,
    sawtooth,
    square_load,
    step,
)


def generations(young: float, old: float, every: float) -> Curve:
    """Young garbage in small teeth, and old garbage that only each full collection takes."""
    small, large = sawtooth(young, every / 20), sawtooth(old, every)
    return lambda t: small(t) + large(t)


def capped(rate: float, cap: float) -> Curve:
    return lambda t: min(cap, rate * t)


def steps(height: float, times: tuple[float, ...]) -> Curve:
    return lambda t: height * sum(t >= at for at in times)


def weekday(low: float, high: float) -> Curve:
    """Diurnal load with a quick peak each hour."""
    day = diurnal(low, high)
    return lambda t: day(t) * (1.6 if t % HOUR < 240 else 1.0)


def asleep(t: float) -> bool:
    return t % (12 * HOUR) > 9 * HOUR


def _offload(seed: int) -> Series:
    kept: Curve = lambda t: 1.5 * GIB * asleep(t)  # noqa: E731
    return long(
        seed, other=kept, ledger=kept, ledger_bound=2 * GIB, load=lambda t: 0 if asleep(t) else 8
    )


def _tides(seed: int) -> Series:
    """Load classes met one after another, each with memory of its own."""
    return long(seed, load=lambda t: 4 + 6 * int(t // (4 * HOUR)) % 40, per_request=3 * MIB)


def ramp(height: float, start: float, takes: float) -> Curve:
    return lambda t: height * min(1.0, max(0.0, t - start) / takes)


def _two_collectors(seed: int) -> Series:
    """Garbage of two processes; each collects in its own time."""
    period = between(seed, 400, 1500)
    one, other = sawtooth(70 * MIB, period), sawtooth(90 * MIB, 2.3 * period)
    return long(seed, other=lambda t: one(t) + other(t), collects=2.3 * period)


def _arenas(seed: int) -> Series:
    """What allocators keep, at times of their own."""
    rng = random.Random(seed)
    starts = tuple(sorted(rng.uniform(HOUR, 40 * HOUR) for _ in range(4)))
    kept = high_water(rng.uniform(130, 210) * MIB, starts, rng.uniform(120, 600))
    return long(seed, other=kept, load=lambda t: 30 if t % (7 * HOUR) < 1800 else 8)


DEVELOPMENT: dict[str, Build] = {
    "noise": lambda seed: long(seed, noise=40 * MIB),
    "collector": lambda seed: short(
        seed,
        other=sawtooth(150 * MIB, between(seed, 60, 600)),
        collects=between(seed, 60, 600),
    ),
    "high water": lambda seed: short(
        seed,
        other=high_water(150 * MIB, (310, 1210, 2110, 3010), 30),
        load=lambda t: 40 if 300 <= t % 900 < 500 else 4,
    ),
    "bounded cache": lambda seed: ledgered(
        short, seed, saturating(800 * MIB, between(seed, 300, 1500), 60), GIB
    ),
    "warm-up": lambda seed: short(seed, other=saturating(600 * MIB, 30)),
    "diurnal load": lambda seed: long(seed, load=diurnal(2, 60)),
    "bursts": lambda seed: short(seed, load=square_load(2, 40, 600), per_request=5 * MIB),
    "adapters": lambda seed: ledgered(short, seed, steps(60 * MIB, (400, 900, 2500)), GIB),
    "idle": lambda seed: long(seed, load=flat(0)),
}

SEEN: dict[str, Build] = {
    "wandering noise": lambda seed: long(seed, noise=60 * MIB),
    "generations": lambda seed: long(
        seed,
        other=generations(40 * MIB, 120 * MIB, between(seed, 600, 7200)),
        collects=between(seed, 600, 7200),
    ),
    "retention": lambda seed: long(
        seed,
        other=high_water(180 * MIB, (2 * HOUR, 9 * HOUR, 20 * HOUR, 31 * HOUR), 300),
        load=lambda t: 50 if t % (11 * HOUR) < HOUR else 6,
    ),
    "cache to its bound": lambda seed: ledgered(
        long, seed, capped(between(seed, 5, 60) * 1024, 900 * MIB), GIB
    ),
    "graph capture": lambda seed: long(
        seed, device=True, device_other=steps(60 * MIB, (120, 900, 7000, 30000))
    ),
    "hourly peaks": lambda seed: long(seed, load=weekday(4, 40)),
    "tides of load": _tides,
    "sleep and offload": _offload,
    "adapters in and out": lambda seed: ledgered(
        long, seed, lambda t: 80 * MIB * ((t // HOUR) % 6), GIB
    ),
    "one step": lambda seed: long(seed, other=step(300 * MIB, between(seed, 500, DAY))),
    "failed scrapes": lambda seed: long(
        seed, silent=lambda t: int(t / 30) % 7 == 0, load=diurnal(4, 30)
    ),
    "engine restarts": lambda seed: long(
        seed,
        epoch=lambda t: 1 + int(t // (6 * HOUR)),
        other=lambda t: 400 * MIB * (1 - math.exp(-(t % (6 * HOUR)) / 20)),
    ),
    "quick noise": lambda seed: short(seed, noise=60 * MIB, load=square_load(0, 30, 400)),
    "broad noise": lambda seed: long(seed, noise=50 * MIB, load=diurnal(6, 12, 5 * HOUR)),
    "old garbage": lambda seed: long(
        seed,
        other=generations(30 * MIB, 150 * MIB, between(seed, 900, 5400)),
        collects=between(seed, 900, 5400),
    ),
    "garbage of two": _two_collectors,
    "arenas": _arenas,
    "second model": lambda seed: long(
        seed, other=ramp(200 * MIB, between(seed, HOUR, DAY), between(seed, 300, 1200))
    ),
    "cache behind a bound": lambda seed: ledgered(
        long, seed, saturating(900 * MIB, between(seed, 2 * HOUR, 10 * HOUR), 600), GIB
    ),
    "batch jobs": lambda seed: long(seed, load=square_load(1, 60, 3 * HOUR), per_request=4 * MIB),
    "quick tides": lambda seed: long(seed, load=diurnal(3, 45, 6 * HOUR), noise=30 * MIB),
    "slow start": lambda seed: short(
        seed, ready_at=700.0, other=ramp(900 * MIB, 0.0, between(seed, 400, 690))
    ),
    "late first requests": lambda seed: short(
        seed,
        other=saturating(350 * MIB, 50, 900),
        load=lambda t: 10 if 900 < t < 3000 else 0,
    ),
    "adapters turned over": lambda seed: ledgered(
        long, seed, lambda t: 120 * MIB * ((t // (2 * HOUR)) % 5), GIB
    ),
    "silences": lambda seed: long(seed, silent=lambda t: t % 5000 < 400, load=diurnal(4, 30)),
    "workspaces": lambda seed: long(
        seed, device=True, device_other=lambda t: 120 * MIB * (t % 9000 < 3000)
    ),
    "restarts": lambda seed: long(
        seed,
        epoch=lambda t: 1 + int(t // (3.5 * HOUR)),
        other=lambda t: 300 * MIB * (1 - math.exp(-(t % (3.5 * HOUR)) / 35)),
    ),
}
