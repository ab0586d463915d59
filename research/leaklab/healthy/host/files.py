"""What only looks like a leak: files in memory, and what becomes a file.

Each is bounded as in ``kernels``.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate

from leaklab.demand import rushes, two_humps
from leaklab.healthy_runs import Spells, integral, levels, long
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits


def _collected_dumps(seed: int) -> Series:
    """A helper of the engine crashes at times, and its core lies in a file system in memory until
    an agent has packed and sent it: for minutes, or for hours while the network is slow."""
    rng = random.Random(seed)
    changes, at = list[tuple[float, float]](), 0.0
    while at < LONGEST:
        at += rng.uniform(1.5, 14) * HOUR
        size, parts, writes = rng.uniform(110, 380) * MIB, 8, rng.uniform(15, 400)
        changes += [(at + writes * part / parts, size / parts) for part in range(parts)]
        at += writes + math.exp(rng.uniform(math.log(400), math.log(5 * HOUR)))
        changes.append((at, -size))
    return long(
        seed,
        **habits(seed),
        other=levels(changes),
        other_in="shared",
        load=rushes(seed, 5, 15, (HOUR, 4 * HOUR), (600, 2 * HOUR)),
    )


def _unpacked_archives(seed: int) -> Series:
    """Whoever needs a package of tools for an answer unpacks it in a file system in memory. What
    was not used for some hours is removed, and packages are used by day more than by night."""
    rng = random.Random(seed)
    used = Spells(rng, (0.3 * HOUR, 5 * HOUR), (600, 3 * HOUR), LONGEST)
    sizes = [rng.uniform(8, 45) * MIB for _ in range(rng.randint(5, 9))]
    keeps, changes, until = rng.uniform(1, 5) * HOUR, list[tuple[float, float]](), [0.0] * 9
    least, at = min(1.0, 270 * MIB / sum(sizes)), 0.0
    while at < LONGEST:
        at += rng.expovariate(1 / (200 if used.on(at) else 4000))
        one = rng.randrange(len(sizes))
        if until[one] < at:
            changes.append((at, least * sizes[one]))
            if until[one]:
                changes.append((until[one], -least * sizes[one]))
        until[one] = at + keeps
    return long(
        seed,
        **habits(seed),
        other=levels(changes),
        other_in="shared",
        load=lambda t: 14.0 if used.on(t) else 5.0,
    )


def _kept_versions(seed: int) -> Series:
    """A table of rules comes in versions, each a file in shared memory. The last two are kept for
    who has not changed over yet, and an older one goes when its last reader closes it."""
    rng = random.Random(seed)
    size, keeps = rng.uniform(40, 85) * MIB, rng.choice((2, 3))
    releases = [0.0, *accumulate(rng.uniform(2, 13) * HOUR for _ in range(36))]
    files = [size * rng.uniform(0.85, 1.15) for _ in releases]
    closes = [rng.uniform(20, HOUR) for _ in releases]
    changes = list(zip(releases, files, strict=True))
    for place, at in enumerate(releases[keeps:]):
        changes.append((at + closes[place], -files[place]))
    return long(
        seed,
        **habits(seed),
        other=levels(changes),
        other_in="shared",
        load=diurnal(3, 19),
    )


def _hourly_files(seed: int) -> Series:
    """What was asked and answered is written to a file of columns at the full hour. Until then its
    rows are in memory, and packing them takes as much again of a column or two."""
    rng = random.Random(seed)
    load, every = two_humps(2, 20, rng.uniform(0, DAY)), rng.choice((0.5, 1, 1, 2)) * HOUR
    worked, packs = integral(load, LONGEST), rng.uniform(20, 200)
    each, extra = rng.uniform(120, 230) * MIB / (20 * every), rng.uniform(0.05, 0.25)

    def rows(t: float) -> float:
        begins = t - t % every
        held = worked(t) - worked(begins)
        if begins and t - begins < packs:
            held += (1 + extra) * (worked(begins) - worked(begins - every))
        return each * held

    return long(seed, **habits(seed), other=rows, other_in="anonymous_other", load=load)


FAMILIES: dict[str, Build] = {
    "collected dumps": _collected_dumps,
    "unpacked archives": _unpacked_archives,
    "kept versions": _kept_versions,
    "hourly files": _hourly_files,
}
