"""What only looks like a leak: queues, stores and copies of a service's data.

Each is bounded as in ``host/kernels``.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right

from leaklab.demand import between_steps, drifting, rushes, two_humps
from leaklab.healthy_runs import Spells, integral, last, levels, long, path
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits

MINUTE = 60.0


def _pinned_prompts(seed: int) -> Series:
    """Customers pay for a prompt that is kept for five minutes or an hour, and again for each time
    that it is used. Its state lies on the host, in no ledger, and a quota bounds them all."""
    rng = random.Random(seed)
    day, quota = two_humps(0.15, 1, rng.uniform(0, DAY)), rng.uniform(200, 310) * MIB
    apart, at, used = rng.uniform(60, 300), 0.0, 0.0
    ends, changes, met = list[tuple[float, float]](), list[tuple[float, float]](), 0
    prompts = list[tuple[float, float]]()
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        while ends and ends[0][0] <= at:
            used -= heapq.heappop(ends)[1]
        size = min(40.0, 1.5 * rng.paretovariate(1.2)) * MIB
        if rng.random() > day(at) or used + size > quota:
            continue
        keeps = rng.choice((300.0, 300.0, HOUR))
        while rng.random() < 0.6 and keeps < 8 * HOUR:
            keeps += rng.uniform(0.2, 1) * keeps
        used += size
        heapq.heappush(ends, (at + keeps, size))
        changes += [(at, size), (at + keeps, -size)]
        met += 1
        prompts.append((at, 1.0))
    return long(
        seed,
        **habits(seed),
        other=levels(changes),
        other_in="anonymous_other",
        load=lambda t: 3 + 13 * day(t),
        counters={"distinct_prompts_total": levels(prompts)},
    )


def _overnight_queue(seed: int) -> Series:
    """Work at half the price is taken in by day and done by night. Its prompts wait in memory, for
    half a day at most, and a quota says when no more is taken. They count as waiting."""
    rng = random.Random(seed)
    phase, quota, each = rng.uniform(0, DAY), rng.uniform(180, 300) * MIB, rng.uniform(0.1, 0.6)
    comes, taken = two_humps(0.1, 1, phase), quota / rng.uniform(5, 12) / HOUR
    done, queue, held = rng.uniform(2, 5) * taken, list[float](), 0.0
    day = two_humps(4, 18, phase)

    def night(t: float) -> bool:
        return (t + phase) / HOUR % 24 < 6

    for minute in range(int(LONGEST / MINUTE) + 1):
        at = minute * MINUTE
        change = taken * comes(at) - (done if night(at) else 0.0)
        held = min(quota, max(0.0, held + change * MINUTE))
        queue.append(held)
    waits = between_steps(queue, MINUTE)
    return long(
        seed,
        **habits(seed),
        other=waits,
        load=lambda t: day(t) + (12 if night(t) and waits(t) > 0 else 0),
        counters={"waiting": lambda t: waits(t) / (each * MIB)},
    )


def _tombstones(seed: int) -> Series:
    """An index of answers only marks what was removed or replaced. When the marked ones are half as
    many as the live, the index is built anew beside the old one, which goes then."""
    rng = random.Random(seed)
    live, load = rng.uniform(80, 150) * MIB, rushes(seed, 5, 17, (HOUR, 5 * HOUR), (900, 3 * HOUR))
    worked, fills = integral(load, LONGEST), rng.uniform(2, 14) * HOUR * 9
    share, builds = rng.uniform(0.35, 0.7), rng.uniform(200, 1500)
    times = [0.0]
    for minute in range(int(LONGEST / MINUTE)):
        if worked(minute * MINUTE) - worked(times[-1]) >= fills:
            times.append(minute * MINUTE)

    def held(t: float) -> float:
        since, marked = t - last(times, t), (worked(t) - worked(last(times, t))) / fills
        if last(times, t) and since < builds:
            return live * (1 + share + since / builds)
        return live * (1 + share * min(1.0, marked))

    return long(seed, **habits(seed), other=held, load=load)


def _resumable_streams(seed: int) -> Series:
    """A client whose connection broke may read its answer from where it was. So answers are kept
    for some ten minutes after their end, and there are more of them after a rush."""
    rng = random.Random(seed)
    load = rushes(seed, rng.uniform(2, 5), rng.uniform(14, 26), (900, 4 * HOUR), (400, 3 * HOUR))
    done, keeps = integral(load, LONGEST), rng.uniform(600, 3600)
    each = rng.uniform(130, 300) * MIB / (26 * keeps)
    return long(
        seed,
        **habits(seed),
        other=lambda t: each * (done(t) - done(t - keeps)),
        other_in="python_objects",
        load=load,
    )


def _replay_buffer(seed: int) -> Series:
    """Who publishes what happens in the cache keeps the last ten thousand batches of events, for
    subscribers that have missed some. A batch is as large as the prompts of its time."""
    rng = random.Random(seed)
    load, sizes = diurnal(5, 17), drifting(seed, 1, rng.uniform(2, 10) * HOUR, 0.35)
    events, covers = integral(lambda t: load(t) * sizes(t), LONGEST), rng.uniform(1, 9) * HOUR
    each = rng.uniform(90, 180) * MIB / (13 * covers)
    return long(
        seed,
        **habits(seed),
        other=lambda t: min(290 * MIB, each * (events(t) - events(t - covers))),
        load=load,
        counters={"prompt_tokens_total": integral(lambda t: 300 * load(t) * sizes(t), LONGEST)},
    )


def _reservoir(seed: int) -> Series:
    """To see how prompts change, a fair sample of some hundred is kept: at first each prompt has a
    place, and later ever fewer take that of another. It begins anew with each report."""
    rng = random.Random(seed)
    places, apart = rng.randint(80, 400), rng.uniform(5, 60)
    each, report = rng.uniform(110, 200) / places, rng.uniform(8, 30) * HOUR
    kept, changes, at, seen, next_report = (
        list[float](),
        list[tuple[float, float]](),
        0.0,
        0,
        report,
    )
    while at < LONGEST:
        if at >= next_report:
            changes.append((at, -sum(kept)))
            kept, seen, next_report = [], 0, at + report
        at += rng.expovariate(1 / apart)
        seen += 1
        size = each * min(6.0, 0.35 * rng.paretovariate(1.4)) * MIB
        if len(kept) < places:
            kept.append(size)
            changes.append((at, size))
        elif rng.random() < places / seen:
            one = rng.randrange(places)
            changes.append((at, size - kept[one]))
            kept[one] = size
    return long(
        seed,
        **habits(seed),
        other=levels(changes),
        other_in="python_objects",
        load=drifting(seed, 8, HOUR),
    )


def _nightly_datastore(seed: int) -> Series:
    """What is drafted from is a store of phrases, and a new one is built from the day's texts each
    night. Both are there until the last request that reads the old one has ended."""
    rng = random.Random(seed)
    begins, lasts = rng.uniform(0.5, 24) * HOUR, rng.uniform(0.3, 3) * HOUR
    size, grace = rng.uniform(120, 230) * MIB, rng.uniform(60, 2400)
    points, held, at = [(0.0, size)], size, begins
    while at < LONGEST:
        new = size * rng.uniform(0.9, 1.1)
        points += [(at, held), (at + lasts, held + new), (at + lasts + grace, held + new)]
        points.append((at + lasts + grace + 5, new))
        held, at = new, at + DAY * rng.uniform(0.97, 1.03)
    return long(
        seed,
        **habits(seed),
        other=path(points),
        other_in="anonymous_other",
        load=two_humps(4, 16, rng.uniform(0, DAY)),
    )


def _held_for_review(seed: int) -> Series:
    """Some answers are read by a person before they go out. They wait with their documents for
    minutes by day, and for hours over a lunch or a night; at most some dozen wait."""
    rng = random.Random(seed)
    works = Spells(rng, (1.5 * HOUR, 6 * HOUR), (HOUR, 4 * HOUR), LONGEST)
    places, rate, at = rng.randint(20, 60), 1 / rng.uniform(120, 700), 0.0
    size, waiting = rng.uniform(130, 290) / places, list[float]()
    changes, free = list[tuple[float, float]](), 0.0
    while at < LONGEST:
        at += rng.expovariate(rate)
        while waiting and waiting[0] <= at:
            heapq.heappop(waiting)
        if len(waiting) >= places:
            continue
        free = max(free, at) + rng.uniform(20, 0.8 / rate)
        while free < LONGEST and not works.on(free):
            free += 120
        held = size * rng.uniform(0.5, 1.3) * MIB
        heapq.heappush(waiting, free)
        changes += [(at, held), (free, -held)]
    people = [at for at, by in sorted(changes) if by > 0]
    ends = sorted(at for at, by in changes if by < 0)
    load = drifting(seed, 9, HOUR)
    return long(
        seed,
        **habits(seed),
        other=levels(changes),
        load=load,
        counters={
            "inflight": lambda t: load(t) + bisect_right(people, t) - bisect_right(ends, t),
        },
    )


FAMILIES: dict[str, Build] = {
    "pinned prompts": _pinned_prompts,
    "overnight queue": _overnight_queue,
    "tombstones": _tombstones,
    "resumable streams": _resumable_streams,
    "replay buffer": _replay_buffer,
    "reservoir": _reservoir,
    "nightly datastore": _nightly_datastore,
    "held for review": _held_for_review,
}
