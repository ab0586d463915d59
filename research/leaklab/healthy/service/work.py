"""What only looks like a leak: what engines are given to do and go through.

Each is bounded as in ``host/engines``.
"""

from __future__ import annotations

import math
import random

from leaklab.healthy_runs import Spells, between, ledgered, long, short
from leaklab.series import DAY, GIB, HOUR, MIB, Build, Series, diurnal


def _weekend(seed: int) -> Series:
    """Two days of which one is a Sunday: the peak of the other is a height without precedent."""
    rng = random.Random(seed)
    day, monday = diurnal(4, 46), rng.uniform(0.85, 1.15) * DAY
    quiet = rng.uniform(0.2, 0.4)
    return long(seed, load=lambda t: day(t) * (1.0 if t >= monday else quiet), per_request=4 * MIB)


def _new_load_class(seed: int) -> Series:
    """Long contexts after a day: buffers that stay, and more while the class is in work."""
    rng = random.Random(seed)
    at, lasts = rng.uniform(22 * HOUR, 32 * HOUR), rng.uniform(3 * HOUR, 5 * HOUR)

    def on(t: float) -> bool:
        return t >= at and (t - at) % DAY < lasts

    return long(
        seed,
        other=lambda t: MIB * (80 * min(1.0, max(0.0, t - at) / 1200) + 110 * on(t)),
        load=lambda t: 7 + 6 * on(t),
    )


def _lagging_pools(seed: int) -> Series:
    """Pools that grow and shrink hours after the load that they are for."""
    lag = between(seed, 3 * HOUR, 6 * HOUR)
    pools = diurnal(0, 130 * MIB)
    return long(seed, load=diurnal(3, 24), other=lambda t: pools(t - lag))


def _rolling_deploys(seed: int) -> Series:
    """New versions of all adapters are loaded one by one before the old go, all at once. What an
    adapter was read into is freed some minutes after it went."""
    rng = random.Random(seed)
    each = rng.uniform(240, 700)
    deploys = Spells(rng, (3 * HOUR, 7 * HOUR), (5 * each + 900,) * 2)

    def adapters(t: float) -> float:
        new = min(5, 1 + int(deploys.since(t) / each)) if deploys.on(t) else 0
        return 66 * MIB * (5 + new)

    return long(
        seed,
        other=lambda t: max(adapters(t), adapters(max(0.0, t - 500))),
        ledger=adapters,
        ledger_bound=700 * MIB,
    )


def _new_shapes(seed: int) -> Series:
    """Each batch shape is compiled and captured when it is met first; the last come late."""
    tau = between(seed, 4 * HOUR, 9 * HOUR)

    def met(t: float) -> int:
        return int(40 * (1 - math.exp(-((t / tau) ** 0.7))))

    return long(
        seed,
        other=lambda t: 4.5 * MIB * met(t),
        other_in="anonymous_other",
        device=True,
        device_other=lambda t: 4 * MIB * met(t),
    )


def _offload_under_pressure(seed: int) -> Series:
    """Blocks of the KV cache go to the host as the device gets full, and are dropped after."""
    rng = random.Random(seed)
    period, share = rng.uniform(5 * HOUR, 11 * HOUR), rng.uniform(0.3, 0.5)
    rise, fall = rng.uniform(1200, 3600), rng.uniform(1800, 5400)
    busy = share * period

    def blocks(t: float) -> float:
        x = t % period
        filled = 1 - math.exp(-min(x, busy) / rise)
        return 1.1 * GIB * filled * math.exp(-max(0.0, x - busy) / fall)

    return ledgered(long, seed, blocks, 1.2 * GIB, load=lambda t: 34 if t % period < busy else 5)


def _woken(seed: int) -> Series:
    """Asleep the engine gives back its caches on host and device, awake it has them again."""
    rng = random.Random(seed)
    sleeps = Spells(rng, (3 * HOUR, 7 * HOUR), (1200, 2 * HOUR))
    height, tau = rng.uniform(140, 220) * MIB, rng.uniform(180, 900)

    def caches(t: float) -> float:
        return 0.0 if sleeps.on(t) else 1 - math.exp(-sleeps.since(t) / tau)

    return long(
        seed,
        other=lambda t: height * caches(t),
        device=True,
        device_other=lambda t: 0.0 if sleeps.on(t) else 700 * MIB,
        load=lambda t: 0 if sleeps.on(t) else 10,
    )


def _uneven_restarts(seed: int) -> Series:
    """Restarts at any time, each with a heat-up of its own: short where its files are cached."""
    rng = random.Random(seed)
    loads_s = rng.uniform(90, 420)
    epochs = [(0.0, 170.0 * MIB, 600.0)]
    while epochs[-1][0] < 2 * DAY:
        at = epochs[-1][0] + rng.uniform(3 * HOUR, 9 * HOUR)
        epochs.append((at, rng.uniform(110, 230) * MIB, 60 * 40.0 ** rng.random()))

    def kept(t: float) -> float:
        began, height, tau = [one for one in epochs if one[0] <= t][-1]
        age = t - began - loads_s
        return 600 * MIB * age / loads_s if age < 0 else height * (1 - math.exp(-age / tau))

    return long(
        seed,
        epoch=lambda t: sum(at <= t for at, _, _ in epochs),
        ready_at=loads_s,
        other=kept,
    )


def _long_prefills(seed: int) -> Series:
    """Prompts of 120,000 tokens, each one step of most of a stall's timeout."""
    rng = random.Random(seed)
    every, takes = rng.uniform(200, 700), rng.uniform(14, 26)

    def on(t: float) -> bool:
        return t % every >= every - takes

    return short(
        seed,
        paused=on,
        other=lambda t: 90 * MIB * on(t),
        counters={"prompt_tokens_total": lambda t: 1500 * t + 120_000 * (t // every)},
    )


FAMILIES: dict[str, Build] = {
    "weekend": _weekend,
    "new load class": _new_load_class,
    "lagging pools": _lagging_pools,
    "rolling deploys": _rolling_deploys,
    "new shapes": _new_shapes,
    "offload under pressure": _offload_under_pressure,
    "woken": _woken,
    "uneven restarts": _uneven_restarts,
    "long prefills": _long_prefills,
}
