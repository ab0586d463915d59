"""What only looks like a leak: workspaces, replicas and peers on the device.

Each is bounded as in ``host/processes``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, long, summed, wandering
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal


def _expert_rebalancing(seed: int) -> Series:
    """The experts in demand get replicas elsewhere: those that move are there twice for a minute or
    two, and then the device has some more of them than before, or less."""
    rng = random.Random(seed)
    moves = list(accumulate(rng.uniform(0.7, 4) * HOUR for _ in range(80)))
    replicas = [rng.uniform(0, 200) * MIB for _ in range(81)]
    takes, twice = rng.uniform(30, 140), rng.uniform(250, 600) * MIB

    def experts(t: float) -> float:
        done = bisect_right(moves, t)
        return replicas[done] + twice * (done > 0 and t - moves[done - 1] < takes)

    return long(
        seed,
        device=True,
        device_other=experts,
        device_other_in="torch_allocated",
        load=diurnal(6, 24),
    )


def _penalty_tensors(seed: int) -> Series:
    """Counts of each token for each place of the batch: while any request asks for penalties."""
    rng = random.Random(seed)
    asked = Spells(rng, (20, 2400), (10, rng.uniform(300, 1500)))
    places, vocabulary = rng.choice((128, 192, 256)), rng.choice((128_256, 151_936, 163_840))
    return long(
        seed,
        device=True,
        device_other=lambda t: 8 * places * vocabulary * asked.on(t),
        device_other_in="torch_allocated",
        load=diurnal(3, 20),
    )


def _prefill_peers(seed: int) -> Series:
    """Buffers for each peer that sends KV blocks: peers are as many as the day needs, are replaced
    at times, and are known to be gone only after a while."""
    rng = random.Random(seed)
    load, each = diurnal(3, 24), rng.uniform(14, 24) * MIB
    wanted, kept_s = rng.uniform(2.8, 4), rng.uniform(900, 3600)
    replaced = Spells(rng, (5 * HOUR, 14 * HOUR), (kept_s, kept_s))

    def peers(t: float) -> int:
        return math.ceil(load(max(0.0, t)) / wanted)

    return long(
        seed,
        device=True,
        device_other=lambda t: each * (max(peers(t), peers(t - kept_s)) + replaced.on(t)),
        device_other_in="non_torch",
        load=load,
    )


def _lazy_modules(seed: int) -> Series:
    """The driver loads a kernel when it is first run, the rare ones on the second day; for one it
    needs a larger stack for every thread of the device."""
    rng = random.Random(seed)
    times = sorted(120 * (2 * DAY / 120) ** rng.random() for _ in range(rng.randint(24, 40)))
    totals = [0.0, *accumulate(rng.uniform(1, 6) * MIB for _ in times)]
    at, stack = rng.uniform(0.5, 30) * HOUR, rng.uniform(40, 90) * MIB
    return long(
        seed,
        device=True,
        device_other=lambda t: totals[bisect_right(times, t)] + stack * (t >= at),
        device_other_in="non_torch",
        load=diurnal(2, 14),
    )


def _ragged_pools(seed: int) -> Series:
    """What is unused of the pools depends on how the sizes of the moment fit into their blocks."""
    rng = random.Random(seed)
    mean, deviation = rng.uniform(120, 200) * MIB, rng.uniform(30, 60) * MIB
    fit = wandering(rng, rng.uniform(600, 6000))
    return long(
        seed,
        device=True,
        device_other=lambda t: max(0.0, mean + deviation * fit(t)),
        load=diurnal(4, 22),
    )


def _additive_increase(seed: int) -> Series:
    """A controller raises the batch by a little each minute, and halves it when answers get late:
    the workspace is as large as the batch may be."""
    rng = random.Random(seed)
    rate = rng.uniform(70, 160) * MIB / HOUR
    cuts = [(0.0, 0.0)]
    while cuts[-1][0] < 2 * DAY:
        began, level = cuts[-1]
        lasts = (rng.uniform(240, 420) * MIB - level) / rate
        cuts.append((began + lasts, (level + rate * lasts) / 2))
    times = [at for at, _ in cuts]

    def workspace(t: float) -> float:
        began, level = cuts[bisect_right(times, t) - 1]
        return level + rate * (t - began)

    return long(
        seed,
        device=True,
        device_other=workspace,
        device_other_in="torch_allocated",
        load=lambda t: 5 + workspace(t) / (25 * MIB),
    )


def _role_changes(seed: int) -> Series:
    """A planner makes a decoder a prefiller for some hours: it is drained, and has another
    workspace and other queues then."""
    rng = random.Random(seed)
    prefills = Spells(rng, (2 * HOUR, 8 * HOUR), (0.7 * HOUR, 5 * HOUR))
    workspace, queues = rng.uniform(180, 380) * MIB, rng.uniform(40, 100) * MIB
    drains = rng.uniform(30, 120)

    def load(t: float) -> float:
        if prefills.since(t) < min(t, drains):
            return 0
        return 5 if prefills.on(t) else 18

    return long(
        seed,
        other=lambda t: queues * prefills.on(t),
        device=True,
        device_other=lambda t: workspace * prefills.on(t),
        load=load,
        counters={"prompt_tokens_total": summed(lambda t: 9000 if prefills.on(t) else 40)},
    )


FAMILIES: dict[str, Build] = {
    "expert rebalancing": _expert_rebalancing,
    "penalty tensors": _penalty_tensors,
    "prefill peers": _prefill_peers,
    "lazy modules": _lazy_modules,
    "ragged pools": _ragged_pools,
    "additive increase": _additive_increase,
    "role changes": _role_changes,
}
