"""What only looks like a leak: memory of the device.

Each comes back, or has a bound. How high it goes, ``observed`` says.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict

from leaklab.days import MINUTE, Days
from leaklab.healthy_runs import integral, levels
from leaklab.observed import Shown, by_change, by_minute, family
from leaklab.series import HOUR, Build


def _registration_cache(engine: random.Random, days: Days) -> Shown:
    """The network library keeps a region of the device mapped for the network card, since mapping
    is slow. Regions go when they are freed below it, or when all are more than a bound: those first
    that were not used for longest."""
    asked = days.usual_traffic(engine)
    places, regions = engine.uniform(20, 150), engine.uniform(0.8, 5)
    apart, frees = engine.uniform(20, 900), engine.uniform(1, 30) * HOUR
    mapped, changes, total = OrderedDict[int, float](), [(0.0, 0.1)], 0.0
    freed = days.times(frees)
    for at, load in zip(days.minutes, asked, strict=True):
        for _ in range(sum(days.rng.random() < load / 8 * MINUTE / apart / 3 for _ in range(3))):
            region = int(places * regions * days.rng.random() ** 1.7)
            if region not in mapped:
                mapped[region] = min(12.0, 0.4 * days.rng.paretovariate(1.4))
                total += mapped[region]
                changes.append((at, mapped[region]))
            mapped.move_to_end(region)
            while total > places:
                gone = mapped.popitem(last=False)[1]
                total -= gone
                changes.append((at, -gone))
        if freed and at >= freed[0]:
            freed.pop(0)
            for region in days.rng.sample(sorted(mapped), int(len(mapped) * 0.4)):
                total -= mapped[region]
                changes.append((at, -mapped.pop(region)))
    return Shown(by_change(days, changes), asked)


def _dispatch_buffers(engine: random.Random, days: Days) -> Shown:
    """Tokens go to the devices of their experts by buffers, one for each pair, as large as the most
    tokens that one step has sent there. An expert that is suddenly in demand makes them larger.
    When the experts are placed anew, all buffers are made anew, too."""
    asked = days.usual_traffic(engine)
    pairs, tail = engine.randint(4, 16), engine.uniform(1.5, 4)
    moves, chunk = days.times(engine.uniform(8, 100) * HOUR), engine.uniform(0.5, 4)
    most, points = [0.0] * pairs, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        if moves and at >= moves[0]:
            moves.pop(0)
            most = [0.3 * one for one in most]
        for n in range(pairs):
            if days.rng.random() < 0.1:
                sent = load * min(8.0, days.rng.paretovariate(tail))
                most[n] = max(most[n], chunk * math.ceil(sent / chunk))
        points.append(sum(most))
    return Shown(by_minute(points), asked)


def _kept_latents(engine: random.Random, days: Days) -> Shown:
    """Who edits a picture turn by turn wants the next turn to begin from the last. Its latents are
    kept on the device for so long after the last turn, up to a bound for all users together. A
    picture is small, and a film is a hundred times as large."""
    asked = days.usual_traffic(engine)
    keeps, apart = engine.uniform(0.1, 10) * HOUR, engine.uniform(30, 1500)
    tail, most = engine.uniform(1.0, 2.5), engine.uniform(3, 60)
    changes, pictures = [(0.0, 0.1)], list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        pictures.append(0.2 * load)
        if days.rng.random() < load / 8 * MINUTE / apart:
            size, turns = min(most, days.rng.paretovariate(tail)), days.rng.randint(1, 12)
            last = at + sum(days.rng.expovariate(1 / 240) for _ in range(turns))
            changes += [(at, size), (last + keeps, -size)]
    total = integral(lambda t: pictures[min(len(pictures) - 1, int(t / MINUTE))], days.until)
    return Shown(by_change(days, changes), asked, {"images_total": total})


def _embedding_cache(engine: random.Random, days: Days) -> Shown:
    """A recommender keeps rows of its tables on the device for the users and goods of the day. A
    row is read when it is missed: at first nearly all are, and later those of few. The cache grows
    by pages up to its bound, and is emptied when the tables are new."""
    asked = days.usual_traffic(engine)
    bound, power = engine.uniform(0.4, 1.3), engine.uniform(0.4, 0.9)
    scale, pages = engine.uniform(0.5, 40) * 60 * 8, engine.randint(20, 200)
    tables = days.times(engine.uniform(10, 90) * HOUR)
    work, points = 0.0, list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        if tables and at >= tables[0]:
            tables.pop(0)
            work = 0.0
        work += load
        rows = min(bound, 1 - math.exp(-((work / scale) ** power)))
        points.append(math.ceil(pages * rows) / pages)
    return Shown(by_minute(points), asked)


def _calibration_samples(engine: random.Random, days: Days) -> Shown:
    """Scales for eight-bit numbers are set from what the layers have really seen. So many samples
    of it are gathered on the device as requests come; when there are enough, the scales are worked
    out, which needs half as much again for a minute or so, and all samples go. The next gathering
    begins hours later, or for the next version."""
    asked = days.usual_traffic(engine)
    enough, share = engine.uniform(0.5, 25) * 60 * 7, engine.uniform(0.3, 1)
    apart, works = engine.uniform(1, 15) * HOUR, engine.uniform(1, 10)
    begins, samples, ends, points = days.rng.expovariate(1 / apart), 0.0, 0.0, list[float]()
    wanted = enough
    for at, load in zip(days.minutes, asked, strict=True):
        if at >= begins and samples < wanted:
            samples += load
            ends = at + works * MINUTE
        elif samples and at >= ends:
            samples, begins = 0.0, at + days.rng.expovariate(1 / apart)
            wanted = enough * days.rng.choice((1.0, share))
        points.append(samples * (1.5 if samples >= wanted else 1.0))
    return Shown(by_minute(points), asked)


def _resolution_ladders(engine: random.Random, days: Days) -> Shown:
    """A figure that speaks is drawn for each viewer in the size that the viewer's network can take.
    A stream begins small and gets four times as large with each rung, of which it tries the next
    after a while. When a network is crowded, all of its viewers fall by a rung or two."""
    asked = days.usual_traffic(engine)
    climbs, stays = engine.uniform(2, 90), engine.uniform(10, 400)
    crowded, growth = engine.uniform(2, 30) * HOUR, engine.uniform(1.6, 4)
    falls, streams, points = days.times(crowded), list[int](), list[float]()
    for at, load in zip(days.minutes, asked, strict=True):
        fall = bool(falls) and at >= falls[0]
        if fall:
            falls.pop(0)
        streams = [
            max(0, rung - days.rng.randint(1, 2))
            if fall
            else min(3, rung + (days.rng.random() < 1 / climbs))
            for rung in streams
            if days.rng.random() > 1 / stays
        ]
        while len(streams) < int(load):
            streams.append(0)
        points.append(sum(growth**rung for rung in streams))
    return Shown(by_minute(points), asked)


def _notebooks(engine: random.Random, days: Days) -> Shown:
    """Researchers share the device with the engine, in notebooks. A notebook takes more with each
    cell that is run, until someone starts it anew or it was idle for long: an hour, or until the
    next morning. Each may take a fixed share of the device at most."""
    asked = days.usual_traffic(engine)
    people, idle = engine.randint(1, 6), engine.choice((0.5, 1, 2, 8, 12)) * HOUR
    comes, cells = engine.uniform(8, 11), engine.uniform(120, 1500)
    most, anew = engine.uniform(4, 20), engine.uniform(0.05, 0.3)
    changes, one_day = [(0.0, 0.1)], 24 * HOUR
    for _ in range(people):
        begins = (comes - days.hour(0)) % 24 * HOUR - one_day
        while begins < days.until:
            at, took = begins + days.rng.uniform(0, 3) * HOUR, 0.0
            ends = at + days.rng.uniform(1, 9) * HOUR
            while at < ends:
                at += days.rng.expovariate(1 / cells)
                more = days.rng.lognormvariate(-0.5, 0.9)
                if days.rng.random() < anew or took + more > most:
                    changes.append((at, -took))
                    took = 0.0
                else:
                    changes.append((at, more))
                    took += more
            changes.append((at + idle, -took))
            begins += one_day * days.rng.choice((1, 1, 1, 2))
    return Shown(by_change(days, changes), asked)


def _inverted_lists(engine: random.Random, days: Days) -> Shown:
    """Documents are found by an index on the device, in some dozen lists. A list that is full is
    made a half larger. By night most of those documents are removed that nobody has asked for
    lately, and all lists are made as long as they need to be."""
    asked = days.usual_traffic(engine)
    lists, first, hour = engine.randint(10, 60), engine.uniform(0.5, 8), engine.uniform(0, 5)
    rate, removed = engine.uniform(0.2, 3) / 60 / 8, engine.uniform(0.3, 0.9)
    sizes = [first * engine.uniform(0.5, 1.5) for _ in range(lists)]
    filled, rooms, points = list(sizes), list(sizes), list[float]()
    packed = True
    for load in asked:
        n = days.rng.randrange(lists)
        filled[n] += lists * rate * load * days.rng.uniform(0, 2)
        if filled[n] > rooms[n]:
            rooms[n] = 1.5 * filled[n]
        by_night = hour <= days.hour(MINUTE * len(points)) < hour + 1
        if by_night and not packed:
            filled = [
                one + (now - one) * (1 - removed) for one, now in zip(sizes, filled, strict=True)
            ]
            rooms = list(filled)
        packed = by_night
        points.append(sum(rooms))
    return Shown(by_minute(points), asked)


def _speaker_tables(engine: random.Random, days: Days) -> Shown:
    """Who speaks when in a conference is told by comparing each piece of speech with each other
    one, in a table on the device that grows with the square of the time. Most conferences end
    within the hour; in a long one pieces are joined when there are too many."""
    asked = days.usual_traffic(engine)
    apart, usual = engine.uniform(0.1, 3) * HOUR, engine.uniform(600, 2 * HOUR)
    most, changes = engine.uniform(1, 3), [(0.0, 0.01)]
    on = list[tuple[float, float]]()
    for at in days.times(apart / 3):
        if days.rng.random() > asked[int(at / MINUTE)] / 24:
            continue
        lasts, pieces, before = min(9 * HOUR, usual * days.rng.lognormvariate(0, 0.6)), 0.0, 0.0
        on += [(at, 1.0), (at + lasts, -1.0)]
        for part in range(1, 31):
            pieces += lasts / 30 / usual
            if pieces > most:
                pieces *= 0.6
            changes.append((at + lasts * part / 31, pieces**2 - before))
            before = pieces**2
        changes.append((at + lasts, -before))
    conferences = levels(on)
    heard = integral(lambda t: 0.02 + 0.1 * conferences(t), days.until)
    return Shown(by_change(days, changes), asked, {"audios_total": heard})


FAMILIES: dict[str, Build] = {
    "registration cache": family(_registration_cache, "non_torch"),
    "dispatch buffers": family(_dispatch_buffers, "torch_allocated"),
    "kept latents": family(_kept_latents, "torch_allocated"),
    "embedding cache": family(_embedding_cache, "non_torch"),
    "calibration samples": family(_calibration_samples, "torch_allocated"),
    "resolution ladders": family(_resolution_ladders, "torch_reserved_unused"),
    "notebooks": family(_notebooks, "non_torch"),
    "inverted lists": family(_inverted_lists, "torch_allocated"),
    "speaker tables": family(_speaker_tables, "torch_reserved_unused"),
}
