"""What only looks like a leak or a hang: what a service does to its engines.

Each is bounded as in ``host/processes``.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate

from leaklab.healthy_runs import Spells, last, long, short, summed
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal


def _sessions(seed: int) -> Series:
    """Each is forgotten some hours after its last use: memory follows an office's day, late."""
    rng = random.Random(seed)
    opens, closes = rng.uniform(6, 9) * HOUR, rng.uniform(16, 20) * HOUR
    kept_s, high = rng.uniform(1.5, 4) * HOUR, rng.uniform(15, 25)
    height = rng.uniform(150, 230) * MIB

    def load(t: float) -> float:
        return high if opens <= t % DAY < closes else 0.15 * high

    begun = summed(load)
    return long(
        seed,
        other=lambda t: height * (begun(t) - begun(t - kept_s)) / (kept_s * high),
        other_in="python_objects",
        load=load,
    )


def _batch_results(seed: int) -> Series:
    """The answers of a job that runs for hours are kept until it is fetched whole."""
    rng = random.Random(seed)
    lasts, fetched = rng.uniform(1, 2.5) * HOUR, rng.uniform(0.2, 1.2) * HOUR
    height = rng.uniform(230, 360) * MIB
    jobs = Spells(rng, (4 * HOUR, 8 * HOUR), (lasts, lasts))

    def kept(t: float) -> float:
        since = jobs.since(t)
        if jobs.on(t):
            return height * since / lasts
        return height if since < min(t, fetched) else 0.0

    return long(seed, other=kept, load=lambda t: 6 + 20 * jobs.on(t))


def _backlog(seed: int) -> Series:
    """More comes in than is done, for an hour or three: what waits holds its prompt."""
    rng = random.Random(seed)
    rushes = Spells(rng, (7 * HOUR, 14 * HOUR), (HOUR, 3 * HOUR))
    deepest, drains, each = rng.uniform(900, 2200), rng.uniform(1.5, 3) * HOUR, 0.16 * MIB

    def waiting(t: float) -> float:
        since = rushes.since(t)
        if rushes.on(t):
            return deepest * min(1.0, since / HOUR)
        return deepest * max(0.0, 1 - since / drains) if since < t else 0.0

    return long(
        seed,
        other=lambda t: each * waiting(t),
        load=lambda t: 32 if waiting(t) else 12,
        counters={
            "waiting": waiting,
            "inflight": lambda t: waiting(t) + (32 if waiting(t) else 12),
        },
    )


def _long_conversations(seed: int) -> Series:
    """As many requests at five as at nine, but each with all that was said since."""
    rng = random.Random(seed)
    opens, lasts = rng.uniform(5, 9) * HOUR, rng.uniform(7, 11) * HOUR
    height = rng.uniform(130, 210) * MIB

    def said(t: float) -> float:
        since = (t - opens) % DAY
        return since / lasts if since < lasts else max(0.0, 1 - (since - lasts) / 5000)

    return long(
        seed,
        other=lambda t: height * said(t),
        load=lambda t: 14 if (t - opens) % DAY < lasts else 4,
        counters={"prompt_tokens_total": summed(lambda t: 1500 * (1 + 5 * said(t)))},
    )


def _autoscaled(seed: int) -> Series:
    """Replicas come and go some minutes late: the load of each climbs, and falls at once."""
    rng = random.Random(seed)
    total, wanted = diurnal(12, rng.uniform(120, 220)), rng.uniform(18, 28)
    late, each = rng.uniform(300, 1500), rng.uniform(3, 5) * MIB
    return long(
        seed,
        load=lambda t: total(t) / max(1, math.ceil(total(max(0.0, t - late)) / wanted)),
        per_request=each,
    )


def _new_version(seed: int) -> Series:
    """After a roll-out the engine needs more than the old version did, and gets warm in its own
    time."""
    rng = random.Random(seed)
    at, loads_s = rng.uniform(6, 34) * HOUR, rng.uniform(120, 400)
    old, new = rng.uniform(40, 90) * MIB, rng.uniform(180, 240) * MIB
    tau = rng.uniform(300, 4000)

    def kept(t: float) -> float:
        age = max(0.0, (t if t < at else t - at) - loads_s)
        return (old if t < at else new) * (1 - math.exp(-age / tau))

    return long(
        seed, epoch=lambda t: 1 + (t >= at), ready_at=loads_s, other=kept, load=diurnal(5, 20)
    )


def _failed_starts(seed: int) -> Series:
    """It dies some times before it is ready, for a file that is not there yet, and then starts."""
    rng = random.Random(seed)
    loads_s, height = rng.uniform(150, 330), rng.uniform(150, 240) * MIB
    tries = rng.randint(2, 5)
    starts = [0.0, *accumulate(rng.uniform(0.3, 0.9) * loads_s for _ in range(tries))]

    def age(t: float) -> float:
        return t - last(starts, t)

    return short(
        seed,
        epoch=lambda t: sum(at <= t for at in starts),
        ready_at=loads_s,
        unresponsive=lambda t: age(t) < 0.1 * loads_s,
        load=lambda t: 0 if age(t) < loads_s else 11,
        other=lambda t: height * min(1.0, age(t) / loads_s),
    )


def _live_migrations(seed: int) -> Series:
    """The machine moves to another host: all is slow at first, and stands still for seconds."""
    rng = random.Random(seed)
    moves = Spells(rng, (400, 1200), (8, 14), HOUR)
    still = rng.uniform(2, 6)
    return short(
        seed,
        paused=moves.on,
        unresponsive=lambda t: moves.on(t) and moves.since(t) < still,
        load=diurnal(5, 18, 2500),
    )


def _lost_scrapes(seed: int) -> Series:
    """A status port that others ask too often: one answer in three or so is late, at random."""
    rng = random.Random(seed)
    lost = Spells(rng, (30, rng.uniform(150, 400)), (20, 110))
    return long(seed, silent=lost.on, load=diurnal(2, 26), per_request=3 * MIB)


FAMILIES: dict[str, Build] = {
    "sessions": _sessions,
    "batch results": _batch_results,
    "backlog": _backlog,
    "long conversations": _long_conversations,
    "autoscaled": _autoscaled,
    "new version": _new_version,
    "failed starts": _failed_starts,
    "live migrations": _live_migrations,
    "lost scrapes": _lost_scrapes,
}
