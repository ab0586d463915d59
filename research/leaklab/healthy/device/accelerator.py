"""What only looks like a leak: what engines and drivers do on the device.

Each is bounded as in ``host/collectors``.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate

from leaklab.demand import beating, drifting, rushes, two_humps
from leaklab.healthy_runs import Spells, integral, levels, long
from leaklab.heights import MINUTES, any_height, by_changes, by_minutes
from leaklab.series import DAY, HOUR, Build, Series, diurnal
from leaklab.views import LONGEST, habits


def _garbage_threshold(seed: int) -> Series:
    """The allocator keeps blocks of sizes that nobody asks for any more. When it has reached a
    share of the device it gives back those that were not used for longest, until it is below."""
    rng = random.Random(seed)
    load, makes = drifting(seed, 8, HOUR, 0.6), rng.uniform(0.2, 40) / HOUR
    kept, share, points = rng.uniform(0, 0.5), rng.uniform(0.1, 0.9), list[float]()
    for at in MINUTES:
        if rng.random() < makes * load(at):
            kept += min(0.4, 0.02 * rng.paretovariate(1.1))
        if kept > 1:
            kept *= share
        points.append(kept)
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_minutes([point + 1e-3 for point in points], any_height(rng)),
        load=load,
    )


def _optimisation_profiles(seed: int) -> Series:
    """An engine was built for some ranges of sizes. Its working memory is that of the largest range
    in use: it is made anew when one is needed that is larger, and given back to the smallest when
    the engine was idle."""
    rng = random.Random(seed)
    sizes = list(accumulate(rng.uniform(0.2, 1) * 2**n for n in range(rng.randint(2, 6))))
    long_ones, idle = rng.uniform(0.002, 0.1), Spells(rng, (HOUR, 20 * HOUR), (300, HOUR), LONGEST)
    day, now, changes = two_humps(1, 17, rng.uniform(0, DAY)), sizes[0], [(0.0, sizes[0])]
    for at in MINUTES:
        needed = sizes[min(len(sizes) - 1, int(rng.expovariate(1) * long_ones * day(at)))]
        wanted = sizes[0] if idle.on(at) else max(now, needed)
        if wanted != now:
            changes.append((at + 1, wanted - now))
            now = wanted
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_changes(changes, any_height(rng)),
        device_other_in="non_torch",
        load=lambda t: 0.0 if idle.on(t) else day(t),
    )


def _layout_conversion(seed: int) -> Series:
    """The prefiller's blocks have another layout than the decoder's, so they are received beside
    the cache and turned around. There are as many such buffers as transfers under way, and those of
    a rush are kept for some minutes or hours."""
    rng = random.Random(seed)
    load = rushes(seed, 4, rng.uniform(10, 24), (600, 6 * HOUR), (120, 2 * HOUR))
    keeps, buffers, points = rng.uniform(120, 5 * HOUR), 0.0, list[float]()
    for at in MINUTES:
        now = max(0.0, rng.gauss(load(at), 1.5))
        buffers = max(now, buffers * math.exp(-60 / keeps))
        points.append(math.ceil(buffers))
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_minutes(points, any_height(rng)),
        device_other_in="torch_allocated",
        load=load,
    )


def _local_memory(seed: int) -> Series:
    """The driver has local memory for all threads that the device can run, as large as the kernel
    needs that needs most so far. A kernel that spills more comes with a rare kind of request, and
    after some hours nothing new is met."""
    rng = random.Random(seed)
    apart, at, now = rng.uniform(0.05, 8) * HOUR, 0.0, 0.0
    changes = [(0.0, 0.05)]
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        needs = min(12.0, rng.paretovariate(0.8))
        if needs > now:
            changes.append((at, needs - now))
            now = needs
        apart *= 1.1
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_changes(changes, any_height(rng)),
        device_other_in="non_torch",
        load=beating(4, 17, 2.2 * HOUR, rng.uniform(3, 11) * HOUR),
    )


def _ring_attention(seed: int) -> Series:
    """A prompt of a million tokens is worked on by several devices, each of which sends its part
    around. A device has two parts at once, larger from chunk to chunk, until the prompt is done."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    at, apart, works = 0.0, rng.uniform(300, 5 * HOUR), list[tuple[float, float]]()
    takes = math.exp(rng.uniform(math.log(40), math.log(4000)))
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        chunks, lasts = rng.randint(4, 24), takes * rng.uniform(0.3, 1.7)
        changes += [(at + lasts * chunk / chunks, 1.0) for chunk in range(chunks)]
        works += [(at, 1.0), (at + lasts, -1.0)]
        at += lasts
        changes.append((at, -float(chunks)))
    working = levels(works)
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_changes([(0.0, 0.1), *changes], any_height(rng)),
        device_other_in="torch_allocated",
        load=lambda t: 5 + 4 * working(t),
        counters={"prompt_tokens_total": integral(lambda t: 600 + 20_000 * working(t), LONGEST)},
    )


def _prompt_scoring(seed: int) -> Series:
    """Who evaluates a model wants the odds of each token of a prompt: a row as wide as the
    vocabulary for each, on the device until the prompt is done. The allocator keeps the largest
    block so far until an evaluation is over."""
    rng = random.Random(seed)
    runs = Spells(rng, (0.3 * HOUR, 16 * HOUR), (200, 5 * HOUR), LONGEST)
    most, points = 0.0, list[float]()
    for at in MINUTES:
        most = max(most, min(20.0, rng.paretovariate(1.3))) if runs.on(at) else 0.0
        points.append(most + 0.3 * runs.on(at) * rng.random())
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_minutes([point + 1e-3 for point in points], any_height(rng)),
        load=lambda t: 16.0 if runs.on(t) else 6.0,
        counters={
            "prompt_tokens_total": integral(lambda t: 9000.0 if runs.on(t) else 1500.0, LONGEST)
        },
    )


def _draft_lengths(seed: int) -> Series:
    """How many tokens are drafted follows how many were accepted lately: more for code, fewer for
    talk. For each number there are buffers, made when it is first used in a shift and dropped when
    the next shift begins with other texts."""
    rng = random.Random(seed)
    accepted, shift = drifting(seed, 4, rng.uniform(0.3, 8) * HOUR, 0.6), rng.uniform(2, 20) * HOUR
    used, points, shifts = set[int](), list[float](), 1
    for at in MINUTES:
        if at >= shifts * shift:
            used, shifts = set(), shifts + 1
        used.add(max(1, min(12, round(accepted(at)))))
        points.append(float(sum(used)))
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_minutes(points, any_height(rng)),
        device_other_in="torch_allocated",
        load=diurnal(4, 17, rng.uniform(0.3, 1) * DAY),
    )


def _video_windows(seed: int) -> Series:
    """A camera's pictures are understood as they come. The states of its last minutes are kept
    outside of the pool, growing until the window is full and level then. Cameras are switched on
    in the morning and off at night, some by hand at any time."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    phase, on = rng.uniform(0, DAY), list[tuple[float, float]]()
    window, spread = rng.uniform(120, 4 * HOUR), rng.uniform(60, 4 * HOUR)
    for _ in range(rng.randint(2, 14)):
        for day in range(-1, 4):
            begins = day * DAY + 7 * HOUR - phase % DAY + rng.uniform(0, spread)
            ends, full = begins + rng.uniform(2, 14) * HOUR, window * rng.uniform(0.7, 1.3)
            filled = [begins + full * part / 20 for part in range(20)]
            parts = [at for at in filled if at < ends]
            changes += [(max(0.0, at), 1.0) for at in parts]
            changes.append((max(0.0, ends), -float(len(parts))))
            on += [(max(0.0, begins), 1.0), (max(0.0, ends), -1.0)]
    cameras = levels(on)
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_changes([(0.0, 0.1), *changes], any_height(rng)),
        device_other_in="torch_allocated",
        load=lambda t: 3 + 1.5 * cameras(t),
        counters={"images_total": integral(lambda t: 0.2 + cameras(t), LONGEST)},
    )


def _deferred_unmaps(seed: int) -> Series:
    """To give memory back the driver has to wait for all work to end. So what is to be given back
    is put on a list, and the list is worked off when it is long or nobody asks for anything."""
    rng = random.Random(seed)
    apart, at, held, room = rng.uniform(20, 2500), 0.0, 0.0, rng.uniform(4, 60)
    times, changes = [0.0], [(0.0, 0.1)]
    pauses = Spells(rng, (HOUR, 12 * HOUR), (30, 600), LONGEST)
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        size = min(8.0, rng.paretovariate(1.2))
        changes.append((at, size))
        held += size
        if held > room or (pauses.on(at) and held):
            changes.append((at + 2, -held))
            held = 0.0
            times.append(at)
    return long(
        seed,
        **habits(seed),
        device=True,
        device_other=by_changes(changes, any_height(rng)),
        device_other_in="non_torch",
        load=lambda t: 0.0 if pauses.on(t) else 8.0 + 4 * (bisect_right(times, t) % 2),
    )


FAMILIES: dict[str, Build] = {
    "garbage threshold": _garbage_threshold,
    "optimisation profiles": _optimisation_profiles,
    "layout conversion": _layout_conversion,
    "local memory": _local_memory,
    "ring attention": _ring_attention,
    "prompt scoring": _prompt_scoring,
    "draft lengths": _draft_lengths,
    "video windows": _video_windows,
    "deferred unmaps": _deferred_unmaps,
}
