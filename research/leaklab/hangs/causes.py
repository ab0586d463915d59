"""How engines hang: what stops them differs, steps end in each.

The process that reads the engine's log has ended, and the worker blocks on a write. The ring that
hands over answers is full, because nothing reads it. A machine wakes from sleep, and the scheduler
waits for a time on a clock that has jumped. Ranks disagree on whether there is one more step, so
all of them accept requests and none starts. After idle hours, the call that should wake the worker
is missed. Answers are held back for a moderation service that no longer responds. A step fails, is
retried, and fails again without end. The first request in the queue needs more room than the engine
has, and no other request may pass it.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from leaklab.hangs.hanging import Way, hangs, queued, until
from leaklab.series import MIB, Curve, Series

TIMES = {
    "full pipe": 1240.0,
    "unread ring": 2290.0,
    "jumped clock": 1810.0,
    "phantom step": 2730.0,
    "missed waking": 2050.0,
    "silent moderator": 1570.0,
    "failing step": 880.0,
    "oversized first": 2480.0,
}
"""When each comes, by name."""


def hanging(series: Series, name: str, at: float, seed: int) -> Series:
    """The engine that hangs at ``at``."""
    return hangs(_WAYS, series, name, at, seed, every=(30, 280), lasts=(1, 13))


def _piled(rng: random.Random, at: float) -> Curve:
    """Who has come since and stays, up to a bound."""
    comes, most = rng.uniform(0.04, 1.5), rng.uniform(4, 120)
    return lambda t: min(most, comes * max(0.0, t - at))


def _busy(rng: random.Random, at: float, then: float) -> Curve:
    """Processor time of which some cores are used, and ``then`` of them when the engine hangs."""
    cores = rng.uniform(0.6, 3.5)
    return lambda t: cores * min(t, at) + then * max(0.0, t - at)


def _full_pipe(series: Series, at: float, rng: random.Random) -> Series:
    count = rng.randint(2, 24)
    engine = queued(series, count, lambda t: count, _piled(rng, at))
    return replace(engine, cpu_s=_busy(rng, at, 0.01))


def _unread_ring(series: Series, at: float, rng: random.Random) -> Series:
    """The ring fills within a minute or so before, in shared memory."""
    count, size, fills = rng.randint(4, 30), rng.uniform(8, 120) * MIB, rng.uniform(10, 90)
    engine = queued(series, count, lambda t: count, _piled(rng, at))
    return replace(
        engine,
        other=lambda t: size * min(1.0, max(0.0, 1 - (at - t) / fills)),
        other_in="shared",
        cpu_s=_busy(rng, at, 1.0),
    )


def _jumped_clock(series: Series, at: float, rng: random.Random) -> Series:
    """What ran has been put back to wait when the machine woke."""
    count, piled = rng.randint(1, 20), _piled(rng, at)
    return replace(
        queued(
            series,
            count,
            lambda t: count if t < at else 0.0,
            lambda t: count + piled(t) if t >= at else 0.0,
        ),
        cpu_s=_busy(rng, at, 0.02),
    )


def _phantom_step(series: Series, at: float, rng: random.Random) -> Series:
    """Who comes is taken in to run, until all places are taken, and waits only then."""
    count, places, comes = rng.randint(1, 8), rng.randint(16, 64), rng.uniform(0.1, 1.5)

    def asked(t: float) -> float:
        return min(places + 40.0, count + math.floor(comes * max(0.0, t - at)))

    engine = queued(
        series, count, lambda t: min(places, asked(t)), lambda t: max(0.0, asked(t) - places)
    )
    prompts = until(lambda t: 1300 * t, at)
    return replace(
        engine,
        cpu_s=_busy(rng, at, rng.uniform(1.0, 4.0)),
        counters=engine.counters | {"prompt_tokens_total": prompts},
    )


def _missed_waking(series: Series, at: float, rng: random.Random) -> Series:
    """Nobody asks for up to a third of an hour before; then one does, and a few others come."""
    count, idle = rng.randint(2, 14), rng.uniform(200, 1100)
    comes, most = rng.uniform(0.003, 0.1), rng.randint(1, 12)

    def waiting(t: float) -> float:
        return min(most, 1 + math.floor(comes * (t - at))) if t >= at else 0.0

    def running(t: float) -> float:
        return count if t < at - idle else 0.0

    engine = queued(series, count, running, waiting)
    return replace(engine, load=running, cpu_s=_busy(rng, at - idle, 0.01))


def _silent_moderator(series: Series, at: float, rng: random.Random) -> Series:
    """All who run are done and hold their places. Clients give up; their places stay taken."""
    count, patience = rng.randint(4, 32), rng.uniform(30, 240)
    gives_up, piled = rng.uniform(0.01, 0.3), _piled(rng, at)
    engine = queued(series, count, lambda t: count, piled)
    return replace(
        engine,
        cpu_s=_busy(rng, at, 0.1),
        counters=engine.counters
        | {"aborted_total": lambda t: 0.01 * t + gives_up * max(0.0, t - at - patience)},
    )


def _failing_step(series: Series, at: float, rng: random.Random) -> Series:
    count, again = rng.randint(1, 16), rng.uniform(0.3, 8)
    engine = queued(series, count, lambda t: count, _piled(rng, at))
    return replace(
        engine,
        cpu_s=_busy(rng, at, rng.uniform(0.5, 1.2)),
        counters=engine.counters | {"errors_total": lambda t: 0.002 * t + again * max(0.0, t - at)},
    )


def _oversized_first(series: Series, at: float, rng: random.Random) -> Series:
    """Requests that run before end one by one, and the last of them ends when it hangs."""
    count, ends, piled = rng.randint(3, 20), rng.uniform(10, 120), _piled(rng, at)

    def running(t: float) -> float:
        return math.ceil(count * min(1.0, max(0.0, (at - t) / ends)))

    engine = queued(series, count, running, lambda t: 1 + piled(t) if t >= at - ends else 0.0)
    usage = until(lambda t: 0.03 + 0.6 * running(t) / count, at)
    return replace(
        engine,
        cpu_s=_busy(rng, at, 0.6),
        counters=engine.counters | {"kv_usage_ratio": usage},
    )


_WAYS: dict[str, Way] = {
    "full pipe": _full_pipe,
    "unread ring": _unread_ring,
    "jumped clock": _jumped_clock,
    "phantom step": _phantom_step,
    "missed waking": _missed_waking,
    "silent moderator": _silent_moderator,
    "failing step": _failing_step,
    "oversized first": _oversized_first,
}
