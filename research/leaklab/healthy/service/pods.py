"""What only looks like a leak: pods, nodes and what runs beside an engine.

Each is bounded as in ``host/collectors``.
"""

from __future__ import annotations

import math
import random

from leaklab.demand import beating, drifting, rushes, two_humps
from leaklab.healthy_runs import Spells, integral, long
from leaklab.heights import MINUTE, MINUTES, any_height, by_changes, by_minutes
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits


def _checkpoint_images(seed: int) -> Series:
    """The processes are saved now and then, so that a new node can go on from there: first all of
    what has changed a little, then less and less in further rounds, to a file system in memory. An
    agent sends the images away, and removes them when the last is sent."""
    rng, changes, at = random.Random(seed), [(0.0, 1e-3)], 0.0
    apart, sends = rng.uniform(0.5, 20) * HOUR, rng.uniform(30, 3 * HOUR)
    while at < LONGEST:
        at += apart * rng.uniform(0.5, 1.5)
        size, total, rounds = rng.uniform(0.4, 1), 0.0, rng.randint(2, 7)
        for number in range(rounds):
            part = size * 0.45**number
            writes = sends * 0.2 * 0.45**number
            changes += [(at + writes * n / 6, part / 6) for n in range(6)]
            at, total = at + writes + rng.uniform(5, 120), total + part
        at += sends * rng.uniform(0.6, 2)
        changes.append((at, -total))
    return long(
        seed,
        **habits(seed),
        other=by_changes(changes, any_height(rng)),
        other_in="shared",
        load=diurnal(4, rng.uniform(9, 19)),
    )


def _seeded_shards(seed: int) -> Series:
    """New replicas get their weights from those that run. A replica lays the shards that it was
    asked for out in shared memory, one after another, and takes them back when nobody has asked
    for some time."""
    rng, changes, at = random.Random(seed), [(0.0, 1e-3)], 0.0
    shards, idle = rng.randint(4, 30), rng.uniform(120, 2 * HOUR)
    pulls, apart = rng.uniform(5, 400), rng.uniform(0.6, 18) * HOUR
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        asked = rng.randint(1, shards)
        for _ in range(asked):
            changes.append((at, 1.0))
            at += rng.expovariate(1 / pulls)
        at += idle
        changes.append((at, -float(asked)))
    return long(
        seed,
        **habits(seed),
        other=by_changes(changes, any_height(rng)),
        other_in="shared",
        load=drifting(seed, 10, rng.uniform(1, 6) * HOUR),
    )


def _hot_restarts(seed: int) -> Series:
    """A proxy beside the engine is replaced by a new process at each change of its routes. The old
    one stays until its last connection has ended or a quarter of an hour, or four hours, are over.
    When routes change often several old ones are there."""
    rng, changes, at = random.Random(seed), [(0.0, 1.0)], 0.0
    apart, drains = rng.uniform(0.2, 10) * HOUR, rng.choice((600.0, 900.0, HOUR, 4 * HOUR))
    while at < LONGEST:
        at += apart * min(6.0, rng.lognormvariate(-0.6, 1.1))
        size, leaves = rng.uniform(0.8, 1.3), drains * rng.uniform(0.3, 1)
        warm = rng.uniform(60, 2400)
        changes += [(at + warm * part / 10, size / 10) for part in range(10)]
        changes += [(at + max(warm, leaves * part / 10), -size / 10) for part in range(1, 11)]
    return long(
        seed,
        **habits(seed),
        malloc=False,
        other=by_changes(changes, any_height(rng)),
        other_in="anonymous_other",
        load=two_humps(3, 15, rng.uniform(0, DAY)),
    )


def _prestarted_workers(seed: int) -> Series:
    """Tasks run in worker processes, of which a new one is started when all are busy. A worker that
    was idle for some time ends, but only while there are more than processors, and the youngest
    first."""
    rng = random.Random(seed)
    load = rushes(seed, rng.uniform(2, 6), rng.uniform(10, 24), (600, 8 * HOUR), (300, 3 * HOUR))
    idle, least = rng.uniform(2, 240), rng.randint(1, 4)
    workers, spare, points = float(least), 0.0, list[float]()
    for at in MINUTES:
        busy = max(0, round(rng.gauss(load(at) / 2, 1)))
        if busy >= workers:
            workers, spare = float(busy), 0.0
        elif workers > least and (spare := spare + 1) >= idle:
            workers, spare = workers - 1, spare * 0.8
        points.append(workers)
    return long(
        seed,
        **habits(seed),
        other=by_minutes(points, any_height(rng)),
        other_in="anonymous_other",
        load=load,
    )


def _mailboxes(seed: int) -> Series:
    """Each two workers have a mailbox in shared memory. It is made twice as large for a message
    that does not fit, and half as large after an hour or so in which half would have done."""
    rng = random.Random(seed)
    boxes, most = [1.0] * rng.randint(4, 40), rng.choice((16.0, 64.0, 256.0))
    since, calm = [0.0] * len(boxes), rng.uniform(0.2, 8) * HOUR
    apart, at, power = rng.uniform(2, 200), 0.0, rng.uniform(0.7, 1.6)
    changes = [(0.0, float(len(boxes)))]
    while at < LONGEST:
        at += rng.expovariate(1 / apart) + 1
        one, size = rng.randrange(len(boxes)), min(most, 0.4 * rng.paretovariate(power))
        before = boxes[one]
        while boxes[one] < size:
            boxes[one] *= 2
        if size > boxes[one] / 2:
            since[one] = at
        elif boxes[one] > 1 and at - since[one] > calm:
            boxes[one], since[one] = boxes[one] / 2, at
        if boxes[one] != before:
            changes.append((at, boxes[one] - before))
    return long(
        seed,
        **habits(seed),
        other=by_changes(changes, any_height(rng)),
        other_in="shared",
        load=beating(4, 16, rng.uniform(1, 5) * HOUR, rng.uniform(2, 7) * HOUR),
    )


def _trace_rings(seed: int) -> Series:
    """Somebody looks for what makes answers slow, and switches a recorder on: a ring for each
    processor, whose pages are there once they were written to. A busy processor's ring is full in
    minutes, an idle one's in hours. All go when the recorder is switched off."""
    rng, changes, at = random.Random(seed), [(0.0, 1e-3)], 0.0
    apart, rings = rng.uniform(1, 20) * HOUR, rng.choice((8, 16, 32))
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        ends, total = at + rng.uniform(300, 16 * HOUR), 0
        fills = [rng.uniform(120, 900) * min(60.0, rng.paretovariate(0.8)) for _ in range(rings)]
        for full in fills:
            written = [at + full * part / 16 for part in range(16)]
            changes += [(one, 1.0) for one in written if one < ends]
            total += sum(one < ends for one in written)
        changes.append((ends, -float(total)))
        at = ends
    return long(
        seed,
        **habits(seed),
        other=by_changes(changes, any_height(rng)),
        other_in="anonymous_other",
        load=drifting(seed, 9, HOUR),
    )


def _gossip(seed: int) -> Series:
    """Replicas tell one another who has what. Something that was removed is remembered as such
    until all have heard of it, and while a zone is cut off nobody knows whether it has. What was
    held back goes within minutes when the zone is back, or when it is given up."""
    rng = random.Random(seed)
    cut = Spells(rng, (0.5 * HOUR, 22 * HOUR), (300, rng.uniform(0.3, 9) * HOUR), LONGEST)
    load, tau, usual = two_humps(2, 15, rng.uniform(0, DAY)), rng.uniform(30, 1500), 0.0
    held, points = 0.0, list[float]()
    for at in MINUTES:
        usual = 5 * load(at)
        held = held + load(at) if cut.on(at) else usual + (held - usual) * math.exp(-MINUTE / tau)
        points.append(held)
    return long(
        seed,
        **habits(seed) | {"per_request": rng.uniform(0.5, 2) * MIB},
        other=by_minutes(points, any_height(rng)),
        other_in="python_objects",
        load=load,
    )


def _raft_logs(seed: int) -> Series:
    """What replicas agree on is a log, of which the part before the last snapshot goes. A snapshot
    comes after so many entries, and waits for the slowest follower for as long as one that is new
    still reads."""
    rng = random.Random(seed)
    load, entries = drifting(seed, 8, rng.uniform(0.5, 10) * HOUR), rng.uniform(0.2, 14) * HOUR * 8
    reads = Spells(rng, (2 * HOUR, 30 * HOUR), (300, 2 * HOUR), LONGEST)
    worked, kept, began, points = integral(load, LONGEST), rng.uniform(0, 0.4), 0.0, list[float]()
    for at in MINUTES:
        log = worked(at) - began
        if log > entries and (not reads.on(at) or log > 2 * entries):
            began = worked(at) - kept * entries
        points.append(log + 1)
    return long(seed, **habits(seed), other=by_minutes(points, any_height(rng)), load=load)


def _relists(seed: int) -> Series:
    """A controller in the pod mirrors the cluster's objects. When its watch is too old it lists
    them all, and both mirrors are there until the new one is complete. There are more objects by
    day, for jobs leave theirs until they are cleaned up at night."""
    rng = random.Random(seed)
    relists = Spells(rng, (600, 10 * HOUR), (10, rng.uniform(30, 1500)), LONGEST)
    phase, objects, points = rng.uniform(0, DAY), rng.uniform(0.5, 2), list[float]()
    jobs, day = rng.uniform(0.0, 0.004), two_humps(0.1, 1, phase)
    left, lists = 0.0, rng.uniform(60, 900)
    for at in MINUTES:
        left = 0.0 if (at + phase) / HOUR % 24 < 0.1 else left + jobs * day(at)
        mirror = objects + left
        again = min(1.0, relists.since(at) / lists) if relists.on(at) else 0.0
        points.append(mirror * (1 + again))
    return long(
        seed,
        **habits(seed),
        malloc=False,
        other=by_minutes(points, any_height(rng)),
        load=lambda t: 3 + 12 * day(t),
    )


FAMILIES: dict[str, Build] = {
    "checkpoint images": _checkpoint_images,
    "seeded shards": _seeded_shards,
    "hot restarts": _hot_restarts,
    "prestarted workers": _prestarted_workers,
    "mailboxes": _mailboxes,
    "trace rings": _trace_rings,
    "gossip": _gossip,
    "raft logs": _raft_logs,
    "relists": _relists,
}
