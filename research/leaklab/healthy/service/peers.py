"""What only looks like a leak or a hang: what peers, disks and logs make it hold.

Each is bounded as in ``host/libraries``.
"""

from __future__ import annotations

import math
import random

from leaklab.healthy_runs import Spells, long, path, short, summed
from leaklab.series import GIB, HOUR, MIB, Build, Series, diurnal, flat


def _prefetched_ahead(seed: int) -> Series:
    """Blocks are fetched from a remote store for requests that wait. When the engine is behind, the
    blocks wait with their requests, up to the size of the window."""
    rng = random.Random(seed)
    behind = Spells(rng, (3 * HOUR, 9 * HOUR), (0.3 * HOUR, 2 * HOUR))
    window, day = rng.uniform(180, 420) * MIB, diurnal(6, 20)
    fills, drains = rng.uniform(300, 3000), rng.uniform(120, 900)

    def fetched(t: float) -> float:
        since = behind.since(t)
        if behind.on(t):
            return 1 - math.exp(-since / fills)
        return math.exp(-since / drains) if since < t else 0.0

    return long(
        seed,
        other=lambda t: window * fetched(t),
        other_in="anonymous_other",
        load=lambda t: 30 if behind.on(t) else day(t),
        counters={"waiting": lambda t: 60 * fetched(t)},
    )


PULL_S = 480.0


def _unpulled(seed: int) -> Series:
    """A prefiller keeps what it made until a decoder pulls it. When a decoder is lost, its share
    stays for eight minutes, until the engine gives up."""
    rng = random.Random(seed)
    lost = Spells(rng, (2 * HOUR, 9 * HOUR), (200, 2400))
    rate = rng.uniform(2, 6) * rng.uniform(0.2, 0.5) * rng.uniform(0.15, 0.3) * MIB
    missed = summed(lost.on)
    return long(
        seed,
        other=lambda t: rate * (missed(t) - missed(t - PULL_S)),
        other_in="anonymous_other",
        load=diurnal(6, 16),
        counters={"aborted_total": lambda t: 0.01 * t + 1.5 * missed(t - PULL_S)},
    )


def _reloaded_checkpoint(seed: int) -> Series:
    """New weights are read from disk in place: one shard after another lies on the host until its
    tensors are copied. No request is in work meanwhile."""
    rng = random.Random(seed)
    reloads = Spells(rng, (2 * HOUR, 9 * HOUR), (240, 1200))
    shard, each = rng.uniform(150, 400) * MIB, rng.uniform(40, 200)
    cached, load = rng.uniform(0.4, 1.1) * GIB, diurnal(5, 18)

    def held(t: float) -> float:
        return shard * (reloads.since(t) % each) / each * reloads.on(t)

    def file(t: float) -> float:
        since = reloads.since(t)
        if reloads.on(t):
            return cached * min(1.0, since / 240)
        return cached * math.exp(-since / 7200)

    return long(
        seed,
        other=held,
        file=file,
        load=lambda t: 0 if reloads.on(t) else load(t),
    )


def _router_index(seed: int) -> Series:
    """Who routes requests knows which engine has which blocks. The index grows with each new block
    of the fleet, and is pruned to four fifths when it is too large."""
    rng = random.Random(seed)
    full, load = rng.uniform(120, 250) * MIB, diurnal(4, 20)
    worked, fills = summed(load), rng.uniform(2, 14) * HOUR * 12

    def held(t: float) -> float:
        part = worked(t) / fills
        return full * (part if part < 1 else 0.8 + (part - 1) % 0.2)

    return long(seed, other=held, load=load)


def _fetched_experts(seed: int) -> Series:
    """Experts that are seldom asked for lie on disk. The step that needs one waits until it is
    read, by way of a buffer on the host."""
    rng = random.Random(seed)
    fetches = Spells(rng, (25, 240), (3, 14), HOUR)
    buffer, read = rng.uniform(100, 300) * MIB, rng.uniform(0.3, 0.8) * GIB
    return short(
        seed,
        paused=fetches.on,
        other=lambda t: buffer * fetches.on(t),
        other_in="anonymous_other",
        file=lambda t: read * (1 - math.exp(-t / 900)),
        load=diurnal(4, 14, 1900),
    )


def _debug_logging(seed: int) -> Series:
    """Someone turns the log level to debug for some minutes. Records queue, up to the queue's
    bound, for the disk is slower than those who write them."""
    rng = random.Random(seed)
    turned = Spells(rng, (400, 1200), (60, 500), HOUR)
    bound, rate = rng.uniform(120, 280) * MIB, rng.uniform(0.3, 2.5) * MIB
    drains, queued = rng.uniform(0.5, 3) * MIB, 0.0
    points = [(0.0, 0.0)]
    for second in range(1, int(HOUR)):
        change = rate if turned.on(float(second)) else -drains
        queued = min(bound, max(0.0, queued + change))
        points.append((float(second), queued))
    return short(seed, other=path(points), other_in="python_objects", load=flat(12))


FAMILIES: dict[str, Build] = {
    "prefetched ahead": _prefetched_ahead,
    "unpulled": _unpulled,
    "reloaded checkpoint": _reloaded_checkpoint,
    "router index": _router_index,
    "fetched experts": _fetched_experts,
    "debug logging": _debug_logging,
}
