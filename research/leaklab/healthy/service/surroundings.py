"""What only looks like a leak or a hang: users, networks, disks and machines.

Each is bounded as in ``host/heaps``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.healthy_runs import Spells, long, short, summed, wandering
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)


def _canary(seed: int) -> Series:
    """A new model gets its share of the users in stages, each after hours without complaints."""
    rng = random.Random(seed)
    stages = list(accumulate(rng.uniform(2, 8) * HOUR for _ in SHARES[1:]))
    users = diurnal(28, rng.uniform(40, 50))
    return long(
        seed,
        load=lambda t: users(t) * SHARES[bisect_right(stages, t)],
        per_request=rng.uniform(3, 4.5) * MIB,
    )


def _slow_readers(seed: int) -> Series:
    """A mobile network is slow for an hour or more: answers are made and done, and wait to be
    read."""
    rng = random.Random(seed)
    slow = Spells(rng, (4 * HOUR, 10 * HOUR), (0.5 * HOUR, 3 * HOUR))
    readers, each = rng.uniform(120, 300), rng.uniform(0.5, 0.95) * MIB
    come, leave = rng.uniform(300, 2400), rng.uniform(60, 900)
    load = diurnal(5, 20)

    def unread(t: float) -> float:
        since = slow.since(t)
        if slow.on(t):
            return readers * (1 - math.exp(-since / come))
        return readers * math.exp(-since / leave) if since < t else 0.0

    return long(
        seed,
        other=lambda t: each * unread(t),
        other_in="python_objects",
        load=load,
        counters={"inflight": lambda t: load(t) + unread(t)},
    )


def _old_connections(seed: int) -> Series:
    """Clients stay with the engine that they were given, and each connection has its buffers; when
    the gateway begins anew all are given out again, here more of them or fewer."""
    rng = random.Random(seed)
    begins = [0.0, *accumulate(rng.uniform(4, 13) * HOUR for _ in range(14))]
    shares = [rng.uniform(70, 230) for _ in begins]
    tau, each = rng.uniform(0.4, 3) * HOUR, rng.uniform(0.5, 0.9) * MIB

    def connections(t: float) -> float:
        turn = bisect_right(begins, t) - 1
        return shares[turn] * (1 - math.exp(-(t - begins[turn]) / tau))

    return long(
        seed, other=lambda t: each * connections(t), load=lambda t: 2 + 0.07 * connections(t)
    )


def _backfilled_nights(seed: int) -> Series:
    """By night a queue of documents takes the places that nobody needs: as many requests as by day,
    each with a book as its prompt."""
    rng = random.Random(seed)
    evening, lasts = rng.uniform(18, 23) * HOUR, rng.uniform(7, 11) * HOUR
    mixes, height = rng.uniform(600, 5000), rng.uniform(140, 230) * MIB

    def books(t: float) -> float:
        since = (t - evening) % DAY
        return min(1.0, since / mixes) if since < lasts else max(0.0, 1 - (since - lasts) / mixes)

    return long(
        seed,
        other=lambda t: height * books(t),
        load=lambda t: 22,
        counters={"prompt_tokens_total": summed(lambda t: 2500 + 20_000 * books(t))},
    )


def _herding(seed: int) -> Series:
    """Balancers that all send to the engine that was least busy a while ago: it is overrun, and
    then left alone."""
    rng = random.Random(seed)
    late, most = rng.uniform(15, 70), rng.uniform(28, 48)
    flips, at = [], 0.0
    while at < HOUR:
        at += late * rng.uniform(0.6, 2.2)
        flips.append(at)
    strength = wandering(rng, 400)
    return short(
        seed,
        load=lambda t: (
            most * min(1.0, max(0.3, 0.75 + 0.25 * strength(t)))
            if bisect_right(flips, t) % 2
            else 2
        ),
        per_request=rng.uniform(3.5, 5.5) * MIB,
    )


def _huge_bodies(seed: int) -> Series:
    """A body of a hundred megabytes of pictures: while it is parsed nobody else is answered."""
    rng = random.Random(seed)
    at, bodies = 0.0, []
    while at < HOUR:
        at += 20 + rng.expovariate(1 / 130)
        size = min(330.0, 40 * rng.paretovariate(1.1)) * MIB
        bodies.append((at, at + size / (40 * MIB), at + rng.uniform(9, 45), size))

    def held(t: float) -> float:
        return sum(
            size * min(1.0, (t - at) / (parsed - at))
            for at, parsed, until, size in bodies
            if at <= t < until
        )

    return short(
        seed,
        other=lambda t: min(450 * MIB, held(t)),
        unresponsive=lambda t: any(at <= t < parsed for at, parsed, _, _ in bodies),
        load=diurnal(4, 14, 2000),
        counters={"images_total": lambda t: 12 * sum(at <= t for at, _, _, _ in bodies)},
    )


def _slow_disk(seed: int) -> Series:
    """Logs fill the page cache until the kernel makes who writes them wait: the engine, whose step
    takes seconds then, and whose records queue."""
    rng = random.Random(seed)
    writes = Spells(rng, (100, 420), (4, 20), HOUR)
    dirty, rate = rng.uniform(80, 160) * MIB, rng.uniform(0.6, 1.6) * MIB
    queued = rng.uniform(30, 110) * MIB

    def unwritten(t: float) -> float:
        since = writes.since(t)
        return 500 * MIB * max(0.0, 1 - since / 20) if writes.on(t) else rate * since

    return short(
        seed,
        paused=writes.on,
        silent=lambda t: writes.on(t) and writes.since(t) > 2,
        other=lambda t: queued * min(1.0, writes.since(t) / 20) * writes.on(t),
        file=lambda t: dirty + min(500 * MIB, unwritten(t)),
        load=diurnal(6, 20, 2700),
    )


def _time_slices(seed: int) -> Series:
    """The device is shared by turns: while the neighbour has work it has the device for seconds at
    a time, and its own context and tensors there."""
    rng = random.Random(seed)
    neighbour = Spells(rng, (200, 800), (120, 900), HOUR)
    every, size = rng.uniform(16, 44), rng.uniform(280, 420) * MIB
    slices = rng.uniform(0.35, 0.52) * every
    return short(
        seed,
        paused=lambda t: neighbour.on(t) and neighbour.since(t) % every < slices,
        device=True,
        device_other=lambda t: size * min(1.0, neighbour.since(t) / 15) * neighbour.on(t),
        device_other_in="non_torch",
        load=lambda t: 24 if neighbour.on(t) else 11,
    )


def _full_accept_queue(seed: int) -> Series:
    """More connections come than are taken: some who ask are dropped, and heard when they ask
    again, one, three or seven seconds later."""
    rng = random.Random(seed)
    rushes = Spells(rng, (200, 700), (40, 240), HOUR)
    dropped = Spells(rng, (3, 20), (1, 7), HOUR)
    most = rng.uniform(35, 60)
    return short(
        seed,
        unresponsive=lambda t: rushes.on(t) and dropped.on(t),
        load=lambda t: most * min(1.0, rushes.since(t) / 20) if rushes.on(t) else 9,
        per_request=rng.uniform(2.5, 4) * MIB,
    )


def _dead_exporter(seed: int) -> Series:
    """The thread that answers for the status dies of an error, and somebody starts it again hours
    later: the day goes on unseen, and a table fills."""
    rng = random.Random(seed)
    dead = Spells(rng, (5 * HOUR, 15 * HOUR), (HOUR, 7 * HOUR))
    height, tau = rng.uniform(80, 160) * MIB, rng.uniform(5, 15) * HOUR
    return long(
        seed,
        silent=dead.on,
        other=lambda t: height * (1 - math.exp(-t / tau)),
        other_in="python_objects",
        load=diurnal(3, 26),
        per_request=rng.uniform(2.5, 4) * MIB,
    )


def _spot_nodes(seed: int) -> Series:
    """Each start is on another kind of machine, with more cores or fewer: what the runtime sets up
    for each of them makes another height, reached before the first request."""
    rng = random.Random(seed)
    starts = [0.0, *accumulate(rng.uniform(3, 13) * HOUR for _ in range(16))]
    cores = [rng.choice((16, 32, 48, 64, 96)) for _ in starts]
    each, loads_s = rng.uniform(1.2, 2.4) * MIB, rng.uniform(80, 420)
    opens = rng.uniform(0.5, 0.9) * loads_s

    def turn(t: float) -> int:
        return bisect_right(starts, t) - 1

    def age(t: float) -> float:
        return t - starts[turn(t)]

    return long(
        seed,
        epoch=lambda t: 1 + turn(t),
        ready_at=loads_s,
        unresponsive=lambda t: age(t) < opens,
        other=lambda t: each * cores[turn(t)] * min(1.0, age(t) / loads_s),
        other_in="anonymous_other",
        load=lambda t: 0 if age(t) < loads_s else 12,
    )


def _revived_core(seed: int) -> Series:
    """The engine's core dies of a fault of its device and is started again by its frontend, which
    answers all the time, and keeps a little of each."""
    rng = random.Random(seed)
    dies = [0.0, *accumulate(rng.uniform(4, 16) * HOUR for _ in range(12))]
    warm, tau = rng.uniform(80, 140) * MIB, rng.uniform(600, 7200)
    loads_s, left = rng.uniform(60, 400), rng.uniform(3, 9) * MIB
    load = diurnal(4, 18)

    def revived(t: float) -> int:
        return bisect_right(dies, t) - 1

    def age(t: float) -> float:
        return t - dies[revived(t)]

    return long(
        seed,
        epoch=lambda t: 1 + revived(t),
        ready_at=loads_s,
        other=lambda t: left * revived(t) + warm * (1 - math.exp(-age(t) / tau)),
        load=lambda t: load(t) if age(t) >= loads_s else 0,
    )


FAMILIES: dict[str, Build] = {
    "canary": _canary,
    "slow readers": _slow_readers,
    "old connections": _old_connections,
    "backfilled nights": _backfilled_nights,
    "herding": _herding,
    "huge bodies": _huge_bodies,
    "slow disk": _slow_disk,
    "time slices": _time_slices,
    "full accept queue": _full_accept_queue,
    "dead exporter": _dead_exporter,
    "spot nodes": _spot_nodes,
    "revived core": _revived_core,
}
