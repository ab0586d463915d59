"""What only looks like a leak: allocators and runtimes of the host.

Each comes back, or has a bound that is less than a budget above where it began.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict

from leaklab.demand import beating, drifting, rushes, two_humps
from leaklab.healthy_runs import Spells, integral, long
from leaklab.heights import MINUTES, any_height, by_changes, by_minutes
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits


def _adaptive_heap(seed: int) -> Series:
    """A frontend in JavaScript lets its heap grow to a multiple of what lived at the last full
    collection, the less the slower it allocates. When it is idle for long it collects to be
    small."""
    rng = random.Random(seed)
    load = rushes(seed, rng.uniform(0.3, 3), rng.uniform(8, 20), (900, 4 * HOUR), (300, 2 * HOUR))
    makes, idle_after = rng.uniform(0.002, 0.05), rng.randint(5, 60)
    limit, idle, heap, points = 2.0, 0.0, 1.0, list[float]()
    for at in MINUTES:
        lives = 1 + 0.05 * load(at)
        heap += makes * load(at)
        idle = idle + 1 if load(at) < 4 else 0.0
        if heap > limit or idle == idle_after:
            limit, heap = lives * (1.3 + min(2.0, makes * load(at) * 4)), lives
        points.append(heap)
    return long(
        seed,
        **habits(seed),
        malloc=False,
        other=by_minutes(points, any_height(rng)),
        load=load,
    )


def _fibre_stacks(seed: int) -> Series:
    """Each stream has a fibre with a stack of its own. Stacks of ended fibres are kept for the next
    ones, and each hour or so the pool is cut to the most that were needed since the last cut."""
    rng = random.Random(seed)
    load, every = drifting(seed, 9, rng.uniform(0.3, 5) * HOUR, 0.6), rng.uniform(0.4, 9) * HOUR
    kept, needed, cut, points = 0.0, 0.0, every, list[float]()
    for at in MINUTES:
        now = max(0.0, rng.gauss(load(at), math.sqrt(load(at))))
        needed, kept = max(needed, now), max(kept, now)
        if at >= cut:
            kept, needed, cut = needed, now, cut + every
        points.append(kept)
    return long(
        seed,
        **habits(seed),
        other=by_minutes(points, any_height(rng)),
        other_in="anonymous_other",
        load=load,
    )


def _binary_references(seed: int) -> Series:
    """Small processes of one runtime pass large bodies on by reference. Who only passes them makes
    hardly any garbage of its own, so it is seldom collected, and its bodies live until it is."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    for _ in range(rng.randint(4, 30)):
        held, at, apart = 0.0, 0.0, rng.uniform(60, 1500)
        collected = rng.uniform(0.01, 0.12)
        while at < LONGEST:
            at += rng.expovariate(1 / apart)
            body = min(30.0, rng.paretovariate(1.1))
            changes.append((at, body))
            held += body
            if rng.random() < collected:
                changes.append((at + 1, -held))
                held = 0.0
    return long(
        seed,
        **habits(seed),
        malloc=False,
        other=by_changes(changes, any_height(rng)),
        load=diurnal(3, rng.uniform(9, 20)),
    )


KEYS = 400


def _sparse_sketches(seed: int) -> Series:
    """How long answers took is counted in a sketch for each customer and path. A sketch is small
    while it has seen little, and of full size from some hundred values on: large customers reach
    that in minutes, and small ones in days. Some services begin anew at midnight."""
    rng = random.Random(seed)
    load, midnight = two_humps(2, 16, rng.uniform(0, DAY)), rng.uniform(1, 24) * HOUR
    worked, anew = integral(load, LONGEST), rng.random() < 0.5
    power, first = rng.uniform(0.7, 1.4), rng.uniform(60, 3600) * 8
    needs = sorted(first * (key + 1) ** power * rng.gammavariate(4, 0.25) for key in range(KEYS))
    changes, full, began = list[tuple[float, float]](), 0, 0.0
    for at in MINUTES:
        while full < KEYS and needs[full] < worked(at) - worked(began):
            changes.append((at, 1.0))
            full += 1
        if anew and at >= midnight:
            changes.append((at, -full))
            full, began, midnight = 0, at, midnight + DAY
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.01), *changes], any_height(rng)),
        other_in="python_objects",
        load=load,
    )


def _memtables(seed: int) -> Series:
    """A store of requests takes in rows in a table in memory. A full one is written to disk, next
    to the table that fills meanwhile; while the disk is slow several wait for that."""
    rng = random.Random(seed)
    load, slow = two_humps(2, 18, rng.uniform(0, DAY)), (rng.uniform(600, 5000), 4 * HOUR)
    worked, stalls = integral(load, LONGEST), Spells(rng, (HOUR, 9 * HOUR), slow, LONGEST)
    size, writes = rng.uniform(0.2, 6) * HOUR * 10, rng.uniform(1, 15)
    waits, done, began, points = 0, 0.0, 0.0, list[float]()
    for at in MINUTES:
        if worked(at) - began > size and waits < 4:
            began, waits = worked(at), waits + 1
        done = done + (0.1 if stalls.on(at) else 1.0) / writes if waits else 0.0
        if done >= 1:
            waits, done = waits - 1, 0.0
        points.append(waits + min(1.0, (worked(at) - began) / size))
    return long(
        seed,
        **habits(seed),
        other=by_minutes(points, any_height(rng)),
        other_in="anonymous_other",
        load=load,
    )


def _rotating_filters(seed: int) -> Series:
    """What was met lately is told by two filters, of which the older one goes when the younger one
    is full or old. A filter that fills early gets one twice as large beside it, up to three."""
    rng = random.Random(seed)
    load, turn = drifting(seed, 8, rng.uniform(1, 12) * HOUR, 0.5), rng.uniform(1.5, 20) * HOUR
    worked, room = integral(load, LONGEST), rng.uniform(0.2, 1.3) * turn * 8
    began, old, points = 0.0, 1.0, list[float]()
    for at in MINUTES:
        full = (worked(at) - worked(began)) / room
        own = 1.0 if full < 1 else 3.0 if full < 3 else 7.0
        if at - began >= turn:
            began, old, own = at, own, 1.0
        points.append(own + old)
    return long(seed, **habits(seed), other=by_minutes(points, any_height(rng)), load=load)


def _last_errors(seed: int) -> Series:
    """Each thread keeps its last error, and with it the frames that it came through and all that
    they held then: until the next error of that thread, minutes or a day later."""
    rng = random.Random(seed)
    held = [0.0] * rng.randint(3, 40)
    changes, at, apart = list[tuple[float, float]](), 0.0, rng.uniform(60, 4000)
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        one, frames = rng.randrange(len(held)), min(40.0, rng.paretovariate(0.9))
        changes.append((at, frames - held[one]))
        held[one] = frames
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.01), *changes], any_height(rng)),
        other_in="python_objects",
        load=beating(3, 14, rng.uniform(1, 4) * HOUR, rng.uniform(3, 9) * HOUR),
    )


def _doubled_buffers(seed: int) -> Series:
    """Reports are written for half an hour or more, each in a buffer that is made twice as large
    whenever it is full. Someone asks for a dozen reports at once, and then for none."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    orders = Spells(rng, (0.5 * HOUR, 8 * HOUR), (300, 3 * HOUR), LONGEST)
    at, apart, length = 0.0, rng.uniform(60, 900), rng.uniform(0.2, 1.5) * HOUR
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        if not orders.on(at):
            continue
        lasts, size, writes = length * rng.lognormvariate(0, 0.5), 1.0, length / 32
        changes.append((at, size))
        while writes * size < lasts:
            changes.append((at + writes * size, size))
            size *= 2
        changes.append((at + lasts, -size))
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.1), *changes], any_height(rng)),
        load=lambda t: 12.0 if orders.on(t) else 4.0,
    )


def _sliced_bodies(seed: int) -> Series:
    """A user's key is a slice of the first request that it came with, so that the whole body is
    kept with it in a table of the last some hundred users. Bodies are small, but for few."""
    rng = random.Random(seed)
    places, users = rng.randint(40, 600), rng.uniform(1.2, 8)
    table, changes, at = OrderedDict[int, float](), list[tuple[float, float]](), 0.0
    apart, most = rng.uniform(10, 400), rng.uniform(8, 100)
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        user = int(places * users * rng.random() ** 2)
        if user in table:
            table.move_to_end(user)
            continue
        table[user] = min(most, rng.paretovariate(1.0))
        changes.append((at, table[user]))
        if len(table) > places:
            changes.append((at, -table.popitem(last=False)[1]))
    return long(
        seed,
        **habits(seed) | {"per_request": rng.uniform(0.5, 2) * MIB},
        other=by_changes(changes, any_height(rng)),
        other_in="python_objects",
        load=two_humps(2, 15, rng.uniform(0, DAY)),
    )


FAMILIES: dict[str, Build] = {
    "adaptive heap": _adaptive_heap,
    "fibre stacks": _fibre_stacks,
    "binary references": _binary_references,
    "sparse sketches": _sparse_sketches,
    "memtables": _memtables,
    "rotating filters": _rotating_filters,
    "last errors": _last_errors,
    "doubled buffers": _doubled_buffers,
    "sliced bodies": _sliced_bodies,
}
