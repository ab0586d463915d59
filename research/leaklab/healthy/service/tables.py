"""What only looks like a leak: tables, queues and caches of a service's data.

Each is bounded as in ``host/collectors``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict

from leaklab.demand import between_steps, drifting, rushes, two_humps
from leaklab.healthy_runs import Spells, integral, last, levels, long
from leaklab.heights import MINUTE, MINUTES, any_height, by_changes, by_minutes
from leaklab.series import DAY, GIB, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits


def _tumbling_windows(seed: int) -> Series:
    """Use is summed up for each customer in windows of some hours. A window gets a row when a
    customer comes for the first time in it, and is there for a while after its end, beside the
    next one, for what comes late."""
    rng = random.Random(seed)
    load, turn = two_humps(1, 16, rng.uniform(0, DAY)), rng.uniform(0.25, 8) * HOUR
    worked, grace = integral(load, LONGEST), turn * rng.uniform(0.02, 0.6)
    scale = turn * 9 * rng.uniform(0.1, 1.5)

    def rows(begins: float, at: float) -> float:
        return 1 - math.exp(-(worked(at) - worked(begins)) / scale) if begins >= 0 else 0.0

    def held(at: float) -> float:
        begins = at - at % turn
        late = rows(begins - turn, begins) if at - begins < grace else 0.0
        return rows(begins, at) + late

    return long(
        seed,
        **habits(seed),
        other=by_minutes([held(at) + 1e-3 for at in MINUTES], any_height(rng)),
        other_in="python_objects",
        load=load,
    )


def _tenant_indexes(seed: int) -> Series:
    """An index of documents is loaded when somebody of its tenant asks. The least recently used
    ones go when all together are above a bound; one that is new may be as large as five others."""
    rng = random.Random(seed)
    sizes = [min(8.0, 0.5 * rng.paretovariate(1.1)) for _ in range(rng.randint(15, 120))]
    bound, apart, at = rng.uniform(0.15, 0.9) * sum(sizes) + 8, rng.uniform(60, 2500), 0.0
    loaded, changes = OrderedDict[int, float](), list[tuple[float, float]]()
    day = two_humps(0.1, 1, rng.uniform(0, DAY))
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        tenant = int(len(sizes) * rng.random() ** 2.5)
        if rng.random() > day(at):
            continue
        if tenant not in loaded:
            while loaded and sum(loaded.values()) + sizes[tenant] > bound:
                changes.append((at, -loaded.popitem(last=False)[1]))
            changes.append((at, sizes[tenant]))
            loaded[tenant] = sizes[tenant]
        loaded.move_to_end(tenant)
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.1), *changes], any_height(rng)),
        other_in="anonymous_other",
        load=lambda t: 2 + 14 * day(t),
    )


def _agent_snapshots(seed: int) -> Series:
    """The state of an agent is kept after each of its steps, so that one may go back to it. A task
    takes from ten minutes to half a day, its state gets larger as it goes on, and all its versions
    go when it is done."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    at, apart, most = 0.0, rng.uniform(200, 3 * HOUR), rng.randint(10, 200)
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        ends = at + min(12 * HOUR, 600 * rng.paretovariate(0.8))
        step, total, now = rng.uniform(20, 400), 0.0, at
        for version in range(most):
            now += rng.expovariate(1 / step)
            if now >= ends:
                break
            changes.append((now, 1 + 0.1 * version))
            total += 1 + 0.1 * version
        changes.append((ends, -total))
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.1), *changes], any_height(rng)),
        other_in="python_objects",
        load=drifting(seed, 7, rng.uniform(0.5, 4) * HOUR),
    )


def _leased_objects(seed: int) -> Series:
    """Blocks of finished prompts go to a store on the host, and have a lease that each use renews.
    At nine tenths of its bound the store drops a tenth of it, of those whose lease is over. It
    accounts for all to the byte."""
    rng = random.Random(seed)
    load, bound = rushes(seed, 3, 16, (HOUR, 6 * HOUR), (0.5 * HOUR, 4 * HOUR)), 0.9 * GIB
    high, drops = rng.uniform(0.8, 0.97), rng.uniform(0.05, 0.4)
    fills, held, points = rng.uniform(0.5, 60) * HOUR * 9, 0.0, list[float]()
    for at in MINUTES:
        held += MINUTE * load(at) / fills
        if held > high:
            held -= drops
        points.append(bound * held)
    store = between_steps(points, MINUTE)
    return long(
        seed,
        **habits(seed),
        other=store,
        other_in="anonymous_other",
        ledger=store,
        ledger_bound=int(bound),
        load=load,
        counters={"distinct_prompts_total": integral(lambda t: 0.3 * load(t), LONGEST)},
    )


def _encoder_budget(seed: int) -> Series:
    """What was made of pictures is kept as long as there is room, and forgotten at once when the
    weights are new. The engine accounts for it, but not for the pictures' hashes and shapes."""
    rng = random.Random(seed)
    load, bound = two_humps(2, 17, rng.uniform(0, DAY)), rng.uniform(0.1, 0.8) * GIB
    weights, at = [0.0], 0.0
    while at < LONGEST:
        at += rng.uniform(2, 40) * HOUR
        weights.append(at)
    pictures = integral(lambda t: 0.1 * load(t), LONGEST)
    fills = rng.uniform(600, 20 * HOUR)

    def kept(t: float) -> float:
        return bound * min(1.0, (pictures(t) - pictures(last(weights, t))) / fills)

    beside = 1 + rng.uniform(0.01, 0.15)
    return long(
        seed,
        **habits(seed),
        other=lambda t: beside * kept(t),
        ledger=kept,
        ledger_bound=int(bound),
        load=load,
        counters={"images_total": pictures},
    )


def _repositories(seed: int) -> Series:
    """Someone who reviews code sends the whole repository along, which is kept until the review is
    closed: within the hour, or next morning."""
    rng = random.Random(seed)
    day, apart = two_humps(0.02, 1, rng.uniform(0, DAY)), rng.uniform(200, 2 * HOUR)
    places, open_ones, at = rng.randint(4, 30), list[float](), 0.0
    changes = list[tuple[float, float]]()
    while at < LONGEST:
        at += rng.expovariate(1 / apart)
        while open_ones and open_ones[0] <= at:
            heapq.heappop(open_ones)
        if rng.random() > day(at) or len(open_ones) >= places:
            continue
        size, ends = min(25.0, rng.paretovariate(1.2)), at + 900 * min(60.0, rng.paretovariate(0.7))
        heapq.heappush(open_ones, ends)
        changes += [(at, size), (ends, -size)]
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 0.1), *changes], any_height(rng)),
        load=lambda t: 2 + 12 * day(t),
        counters={"prompt_tokens_total": integral(lambda t: 400 + 6000 * day(t), LONGEST)},
    )


def _shadow_traffic(seed: int) -> Series:
    """Each request goes to a candidate, too, and waits with its answer until both can be compared.
    The candidate is slower: it lags behind by day, catches up by night, and what it cannot do
    within a bound is not compared."""
    rng = random.Random(seed)
    load, pace = two_humps(1, 14, rng.uniform(0, DAY)), rng.uniform(3, 12)
    lag, most, points = 0.0, rng.uniform(0.3, 20) * HOUR * 8, list[float]()
    for at in MINUTES:
        lag = min(most, max(0.0, lag + MINUTE * (load(at) - pace)))
        points.append(lag + 30 * load(at))
    held = by_minutes(points, any_height(rng))
    return long(seed, **habits(seed), other=held, other_in="python_objects", load=load)


def _crawl_frontiers(seed: int) -> Series:
    """An agent reads a site page by page. Each page has links to some more, so the list of what is
    still to read gets longer and longer, until most links lead to what was read: then it gets
    shorter, and in the end the site is done."""
    rng, changes = random.Random(seed), list[tuple[float, float]]()
    crawls, at = list[tuple[float, float]](), rng.uniform(0, 3) * HOUR
    while at < LONGEST:
        lasts, site = rng.uniform(0.3, 14) * HOUR, rng.uniform(0.3, 1)
        links, before = rng.uniform(2, 12), 0.0
        for step in range(1, 101):
            read = step / 100
            # A page's links lead to what nobody knows yet in the share that is not known.
            known = 1 - math.exp(-links * read) * (1 - read)
            frontier = site * max(0.0, known - read)
            changes.append((at + lasts * read, frontier - before))
            before = frontier
        crawls += [(at, 1.0), (at + lasts, -1.0)]
        at += lasts + rng.uniform(0.2, 10) * HOUR
    crawling = levels(crawls)
    return long(
        seed,
        **habits(seed),
        other=by_changes([(0.0, 1e-3), *changes], any_height(rng)),
        other_in="python_objects",
        load=lambda t: 4 + 9 * crawling(t),
    )


def _late_notices(seed: int) -> Series:
    """A table says which replica has which prompts, and it is told by all others what they drop.
    Messages come in order, but late ones are held back until those before have come: minutes of
    them, when a replica is slow."""
    rng = random.Random(seed)
    slow = Spells(rng, (0.2 * HOUR, 10 * HOUR), (120, rng.uniform(0.2, 3) * HOUR), LONGEST)
    load, tau = diurnal(3, 18), rng.uniform(60, 900)
    held, points = 0.0, list[float]()
    for at in MINUTES:
        held = held + load(at) if slow.on(at) else held * math.exp(-MINUTE / tau)
        points.append(min(held, 1200.0) + load(at))
    own = habits(seed) | {"per_request": rng.uniform(0.4, 2) * MIB}
    return long(seed, **own, other=by_minutes(points, any_height(rng)), load=load)


FAMILIES: dict[str, Build] = {
    "tumbling windows": _tumbling_windows,
    "tenant indexes": _tenant_indexes,
    "agent snapshots": _agent_snapshots,
    "leased objects": _leased_objects,
    "encoder budget": _encoder_budget,
    "repositories": _repositories,
    "shadow traffic": _shadow_traffic,
    "crawl frontiers": _crawl_frontiers,
    "late notices": _late_notices,
}
