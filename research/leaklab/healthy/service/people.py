"""What only looks like a leak: what people and agents leave with a service.

Each comes back, or has a bound. How high it goes, ``observed`` says.
"""

from __future__ import annotations

import math
import random

from leaklab.days import MINUTE, RHYTHMS, Days
from leaklab.observed import Shown, by_change, by_minute, family
from leaklab.series import DAY, HOUR, Build

Changes = list[tuple[float, float]]


def _weekly_clean_up(engine: random.Random, days: Days) -> Shown:
    """Drafts that nobody has sent stay until someone's weekly job removes all that are older than a
    day or two. So memory rises from day to day, and most of it goes once a week."""
    asked = days.usual_traffic(engine)
    every, keeps = engine.choice((2, 3, 7)) * DAY, engine.uniform(0, 0.5)
    sent, next_one = engine.uniform(0, 0.6) / DAY, days.rng.uniform(0, every)
    drafts, points = 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        drafts += load - drafts * sent * MINUTE
        if at >= next_one:
            drafts, next_one = keeps * drafts, next_one + every
        points.append(drafts)
    return Shown(by_minute(points), asked)


def _consolidated_notes(engine: random.Random, days: Days) -> Shown:
    """Agents take notes of what they learn, and in a quiet hour of the night a model sums up the
    notes of each in fewer words. What is left is summed up again the next night, so that memory
    rises from day to day, and less each day."""
    asked = days.usual_traffic(engine)
    keeps, hour = engine.uniform(0.1, 0.6), engine.uniform(1, 5)
    takes, notes, sums, points = engine.uniform(5, 120), 0.0, False, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        notes += load
        sums = hour <= days.hour(at) < hour + takes / 60
        notes *= keeps ** (1 / takes) if sums else 1.0
        points.append(notes)
    return Shown(by_minute(points), asked)


def _edit_histories(engine: random.Random, days: Days) -> Shown:
    """People write documents together with a model. Each change is kept so that it can be undone,
    for as long as anybody has the document open: minutes mostly, and a whole working day at times.
    A long history is made shorter by leaving out each second change."""
    asked = days.usual_traffic(engine)
    opens, usual = engine.uniform(120, 2400), engine.uniform(10, 90) * 60
    bound = engine.uniform(10, 300)
    changes, documents = list[tuple[float, float]](), list[tuple[float, float]]()
    for at, load in zip(days.minutes, asked, strict=True):
        if days.rng.random() > load / 8 * MINUTE / opens:
            continue
        lasts = min(12 * HOUR, usual * days.rng.lognormvariate(0, 1.1))
        typing, kept, now = days.rng.uniform(20, 400), 0.0, at
        while now < at + lasts:
            changes.append((now, 1.0))
            kept, now = kept + 1, now + days.rng.expovariate(1 / typing)
            if kept > bound:
                changes.append((now, -kept / 2))
                kept /= 2
        changes.append((at + lasts, -kept))
        documents += [(at, 1.0), (at + lasts, -1.0)]
    return Shown(by_change(days, [(0.0, 0.1), *changes]), asked)


def _retried_webhooks(engine: random.Random, days: Days) -> Shown:
    """Results of long jobs are sent to their customers' own servers. While one of those is down its
    results wait and are tried again, ever more rarely, until they are some hours or a day old. When
    the server is back all go within minutes."""
    asked = days.usual_traffic(engine)
    count, power = engine.randint(4, 30), engine.uniform(0.2, 1.2)
    apart, usual = engine.uniform(4, 60) * HOUR, engine.uniform(300, 2 * HOUR)
    oldest = engine.choice((1, 3, 12, 24)) * 60
    shares = [(n + 1.0) ** -power for n in range(count)]
    held = [0.03 * load for load in asked]
    for share in shares:
        for begins in days.times(apart):
            lasts = min(30 * HOUR, usual * days.rng.paretovariate(1.0))
            first, total = int(begins / MINUTE), 0.0
            last = min(len(asked), int((begins + lasts) / MINUTE))
            for n in range(first, last):
                total += share * (asked[n] - (asked[n - oldest] if n - oldest >= first else 0.0))
                held[n] += total
            for n in range(last, min(len(asked), last + 60)):
                total *= 0.7
                held[n] += total
    return Shown(by_minute(held), asked)


def _assigned_partitions(engine: random.Random, days: Days) -> Shown:
    """Requests come from a queue in partitions, which are divided among all replicas, each with
    what was fetched ahead. When replicas come, or one is lost, they are divided anew; the new owner
    fetches before the old one has let go."""
    asked = days.usual_traffic(engine)
    partitions, most = engine.choice((12, 24, 48, 96)), engine.randint(3, 12)
    apart, slack = engine.uniform(0.5, 14) * HOUR, engine.uniform(0.1, 0.6)
    replicas, own, changes = max(2, most // 2), 0.0, list[tuple[float, float]]()
    for at in [0.0, *days.times(apart)]:
        replicas = max(2, min(most, replicas + days.rng.choice((-2, -1, -1, 1, 1, 2))))
        share, until = math.ceil(partitions / replicas), at + days.rng.uniform(20, 900)
        gains = max(0, share - int(own))
        changes += [(at + (until - at) * part / 6, gains / 6) for part in range(1, 7)]
        changes.append((until, share - own - gains))
        own = float(share)
        for part in range(4):
            size, begins = slack * days.rng.random() * share, at + apart * part / 5
            changes += [(begins, size / 2), (begins + days.rng.uniform(60, 3000), -size / 2)]
    return Shown(by_change(days, changes), asked)


def _after_the_launch(engine: random.Random, days: Days) -> Shown:
    """Whoever hears of a new product tries it, and few stay: of those who came at one hour ever
    fewer come back, as a power of the time since. Each who tries it leaves a conversation, which
    is kept for some hours. Someone with many followers tries it again and again."""
    power, quick = engine.uniform(0.4, 1.3), engine.uniform(600, 3 * HOUR)
    keeps, low = engine.uniform(0.2, 14) * HOUR, engine.uniform(1, 4)
    heard = [
        (at, min(4.0, 0.4 * days.rng.paretovariate(1.1)))
        for at in [-days.rng.uniform(0, 2 * DAY), *days.times(engine.uniform(8, 40) * HOUR)]
    ]
    usual = days.traffic(engine.choice(RHYTHMS), 0.5, 1.0)
    asked, kept, points = list[float](), 0.0, list[float]()
    for at, part in zip(days.minutes, usual, strict=True):
        crowd = sum(
            size * (1 + (at - began) / quick) ** -power * min(1.0, (at - began) / 900)
            for began, size in heard
            if began < at
        )
        asked.append(min(40.0, low + 14 * part * crowd))
        kept += (asked[-1] - kept) * MINUTE / keeps
        points.append(kept)
    return Shown(by_minute(points), asked)


def _search_trees(engine: random.Random, days: Days) -> Shown:
    """Proofs are looked for in a tree of attempts, beside a table of all positions that were met.
    The table is reserved as a whole, and its pages are there once they were hit: quickly at first.
    Both go when the proof is found or given up, after minutes or most of a day."""
    asked = days.usual_traffic(engine)
    apart, usual = engine.uniform(0.1, 5) * HOUR, engine.uniform(0.2, 5) * HOUR
    table, fills = engine.uniform(0.2, 3), engine.uniform(0.1, 1.2) * usual
    changes, at = [(0.0, 0.01)], days.rng.uniform(0, apart)
    while at < days.until:
        lasts = min(20 * HOUR, usual * days.rng.lognormvariate(0, 0.8))
        grows, before = days.rng.uniform(0.3, 1.0) / usual, 0.0
        for part in range(1, 41):
            since = lasts * part / 41
            now = min(3.0, grows * since) + table * -math.expm1(-since / fills)
            changes.append((at + since, now - before))
            before = now
        changes.append((at + lasts, -before))
        at += lasts + days.rng.expovariate(1 / apart)
    return Shown(by_change(days, changes), asked)


def _initial_syncs(engine: random.Random, days: Days) -> Shown:
    """When a replica of a store is new, all is copied to it. What changes meanwhile is kept here in
    order and sent after the copy, which takes minutes by night and hours by day."""
    asked = days.usual_traffic(engine)
    copies, apart = engine.uniform(5, 200), engine.uniform(3, 30) * HOUR
    sends, begins = engine.uniform(1.5, 10), days.times(apart)
    left, kept, points = 0.0, 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        if begins and at >= begins[0]:
            begins.pop(0)
            left += copies * days.rng.uniform(0.6, 1.4)
        if left > 0:
            left, kept = left - 4 / (4 + load), kept + load
        else:
            kept = max(0.0, kept + load - sends * 8) if kept else 0.0
        points.append(kept + 0.2 * load)
    return Shown(by_minute(points), asked)


FAMILIES: dict[str, Build] = {
    "weekly clean-up": family(_weekly_clean_up, "python_objects"),
    "consolidated notes": family(_consolidated_notes, "python_objects"),
    "edit histories": family(_edit_histories, "python_objects"),
    "retried webhooks": family(_retried_webhooks, "python_objects"),
    "assigned partitions": family(_assigned_partitions, "malloc_in_use"),
    "after the launch": family(_after_the_launch, "malloc_in_use"),
    "search trees": family(_search_trees, "anonymous_other"),
    "initial syncs": family(_initial_syncs, "shared"),
}
