"""What only looks like a leak: what is kept for a time, or up to a far bound.

Each comes back, or has a bound. How high it goes, ``observed`` says.
"""

from __future__ import annotations

import math
import random
from collections import deque
from itertools import accumulate

from leaklab.days import MINUTE, Days, worked_off
from leaklab.observed import Shown, by_change, by_minute, family
from leaklab.series import DAY, HOUR, Build


def _kept_for(work: list[float], minutes: float) -> list[float]:
    """Of what came by each minute, that which came within so many minutes before."""
    ago = max(1, round(minutes))
    return [total - (work[n - ago] if n >= ago else 0.0) for n, total in enumerate(work)]


def _disk_tier_index(engine: random.Random, days: Days) -> Shown:
    """Blocks of the cache go to a disk of some terabytes, and each has an entry in a table in
    memory. The disk takes days to fill, more slowly as more prompts are there already. A customer
    who leaves has all blocks removed."""
    asked = days.usual_traffic(engine)
    bound, met = engine.uniform(5, 70) * 60 * 7, engine.uniform(0.3, 0.9)
    leave, entries, points = days.times(engine.uniform(15, 120) * HOUR), 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        entries = min(bound, entries + load * (1 - met * entries / bound))
        if leave and at >= leave[0]:
            leave.pop(0)
            entries *= days.rng.uniform(0.6, 0.97)
        points.append(entries)
    return Shown(by_minute(points), asked)


def _watched_fields(engine: random.Random, days: Days) -> Shown:
    """An agent reads some dozen figures of each device and keeps all readings for a fixed time,
    from six hours to two and a half days, in blocks of an hour that go as a whole. Who asks for
    more figures for a while makes the blocks larger."""
    asked = days.usual_traffic(engine)
    keeps, most = engine.choice((6, 12, 24, 24, 36, 48, 60)), engine.uniform(1, 2.5)
    rates, more = list[float](), 1.0
    for minute in range(len(days.minutes)):
        if minute % 60 == 0 and days.rng.random() < 0.08:
            more = days.rng.choice((1.0, days.rng.uniform(1, most)))
        rates.append(more)
    work = list(accumulate(rates))
    points = [
        total - (work[60 * (n // 60 - keeps) - 1] if n // 60 > keeps else 0.0)
        for n, total in enumerate(work)
    ]
    return Shown(by_minute(points), asked)


def _head_blocks(engine: random.Random, days: Days) -> Shown:
    """A small server of metrics in the pod keeps its youngest samples in memory. When they span
    three hours the first two are written out, and memory for both is there meanwhile. A deployment
    of anybody brings new series, and the old ones go only when they are written out."""
    asked = days.usual_traffic(engine)
    span, each = engine.choice((1.0, 2.0, 2.0, 4.0, 8.0)) * HOUR, engine.uniform(0.3, 2)
    deploys, comes = days.times(engine.uniform(2, 30) * HOUR), engine.uniform(0.2, 1.5)
    fresh, stale, samples, cut = 1.0, 0.0, 0.0, 1.5 * span
    points = list[float]()
    for at in days.minutes:
        if deploys and at >= deploys[0]:
            deploys.pop(0)
            stale += comes * days.rng.random() * fresh
        samples += MINUTE / span
        held, writes = fresh + stale + each * samples * (fresh + 0.2 * stale), at >= cut
        points.append(1.25 * held if writes else held)
        if writes:
            samples, stale, cut = samples - 1, 0.4 * stale, cut + span
    return Shown(by_minute(points), asked)


def _tls_sessions(engine: random.Random, days: Days) -> Shown:
    """A session of an encrypted connection can be resumed until it is too old: five minutes, or a
    day. The library looks for old ones only at each 255th new connection, which by night is hours
    away, and has at most some ten thousand."""
    asked = days.usual_traffic(engine)
    lasts = math.exp(engine.uniform(math.log(300), math.log(30 * HOUR)))
    each, most = engine.uniform(0.02, 2), engine.uniform(0.3, 2) * lasts / MINUTE * 8
    kept, total, new, points = deque[tuple[float, float]](), 0.0, 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        came = load * days.rng.uniform(0.6, 1.4)
        kept.append((at, came))
        total, new = total + came, new + each * came
        while new > 255 and kept[0][0] < at - lasts:
            total -= kept.popleft()[1]
        while total > most and len(kept) > 1:
            total -= kept.popleft()[1]
        new %= 255.0001
        points.append(total)
    return Shown(by_minute(points), asked)


def _tracked_connections(engine: random.Random, days: Days) -> Shown:
    """An agent that watches the network has an entry for each connection. One that was closed goes
    within minutes, and one that just went silent, as those of phones do, after hours or days."""
    asked = days.usual_traffic(engine)
    silent, timeout = engine.uniform(0.002, 0.05), engine.choice((1, 5, 12, 24, 48, 72)) * 60
    lives, open_now, points = engine.uniform(5, 200), 0.0, list[float]()
    for load, gone in zip(asked, _kept_for(worked_off(asked), timeout), strict=True):
        open_now += (load - open_now) / lives
        points.append(2 * load + 3 * open_now + silent * gone)
    return Shown(by_minute(points), asked)


LIFETIMES = 10


def _fetched_pages(engine: random.Random, days: Days) -> Shown:
    """Pages that a tool has fetched are kept for as long as their servers allow, which is a minute
    for some and a week for others, and about as many for each time between. All together have a
    bound, and the oldest go first."""
    asked = days.usual_traffic(engine)
    work, longest = worked_off(asked), engine.uniform(20, 170) * 60
    known, bound = engine.uniform(0.1, 0.5), engine.uniform(0.3, 2.5)
    sums, most = [0.0] * len(asked), 0.0
    for part in range(LIFETIMES):
        lifetime = longest ** ((part + 1) / LIFETIMES)
        weight = (1 - known) ** part
        most += bound * 7 * weight * lifetime
        for n, kept in enumerate(_kept_for(work, lifetime)):
            sums[n] += weight * kept
    return Shown(by_minute([min(most, one) for one in sums]), asked)


def _tiered_merges(engine: random.Random, days: Days) -> Shown:
    """An index of texts writes a segment for each so many documents. Two segments of one size are
    merged to one of the next, which needs memory for both meanwhile: the larger the merge, the
    rarer. The largest size has a bound."""
    asked = days.usual_traffic(engine)
    segment, levels_most = engine.uniform(10, 150) * 7, engine.randint(3, 7)
    takes, power = engine.uniform(20, 400), engine.uniform(0.5, 0.9)
    changes, written, next_one = [(0.0, 0.1)], 0, segment
    for at, work in zip(days.minutes, worked_off(asked), strict=True):
        if work < next_one:
            continue
        written, next_one = written + 1, next_one + segment
        level = min(levels_most, (written & -written).bit_length() - 1)
        size, lasts = 2 ** (level * power), takes * 2**level
        changes += [(at + lasts * part / 8, size / 8) for part in range(8)]
        changes.append((at + lasts * days.rng.uniform(1, 1.3), -size))
    return Shown(by_change(days, changes), asked)


def _refitted_forecasts(engine: random.Random, days: Days) -> Shown:
    """A planner learns from the past how much traffic will come. Each few hours it fits its model
    anew to all that it has kept, which needs memory for some minutes, and more from day to day,
    until the past is as long as it wants. At the start it reads some of the past from a store."""
    asked = days.usual_traffic(engine)
    every, takes = engine.uniform(1, 20) * HOUR, engine.uniform(60, 2400)
    longest, first = engine.uniform(1, 7) * DAY, engine.uniform(0, 2) * DAY
    kept = engine.uniform(0.02, 0.3)
    changes, at = [(0.0, kept * min(longest, first))], days.rng.uniform(0, every)
    changes += [(t, kept * 600.0) for t in days.minutes[::10] if t > 0 and first + t < longest]
    while at < days.until:
        size = min(longest, first + at)
        changes += [(at + takes * part / 4, size / 4) for part in range(4)]
        changes.append((at + takes * days.rng.uniform(1, 1.5), -size))
        at += every * days.rng.uniform(0.95, 1.05)
    return Shown(by_change(days, changes), asked)


FAMILIES: dict[str, Build] = {
    "disk tier index": family(_disk_tier_index, "python_objects"),
    "watched fields": family(_watched_fields, "anonymous_other", malloc=False),
    "head blocks": family(_head_blocks, "anonymous_other", malloc=False),
    "TLS sessions": family(_tls_sessions, "malloc_in_use"),
    "tracked connections": family(_tracked_connections, "anonymous_other", malloc=False),
    "fetched pages": family(_fetched_pages, "python_objects"),
    "tiered merges": family(_tiered_merges, "anonymous_other"),
    "refitted forecasts": family(_refitted_forecasts, "malloc_in_use"),
}
