"""How engines hang: what is seen of it differs, steps end in each.

No file can be opened any more: the frontend takes in nobody and answers no probe. A debugger or the
kernel's freezer has stopped the worker, which uses no time at all. The worker is above its soft
limit of memory, and the kernel lets it do nothing but look for pages to give back. An adapter's
file lies on a mount whose server is gone. Two long requests push one another out of the cache for
ever. The device has fallen off its bus, and clients give up one by one. A regular expression tries
all ways to match within the engine's loop. A trainer has paused the engine, and has died.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from leaklab.hangs.hanging import Way, hangs, queued, until
from leaklab.series import MIB, Curve, Series

TIMES = {
    "descriptors": 1130.0,
    "stopped": 2410.0,
    "reclaimed": 1690.0,
    "mount": 640.0,
    "livelock": 2080.0,
    "lost device": 1420.0,
    "backtracking": 2870.0,
    "unresumed": 980.0,
}
"""When each comes, by name."""
UNANSWERED = {"descriptors"}
"""All that is known of these is that no client gets an answer."""


def hanging(series: Series, name: str, at: float, seed: int) -> Series:
    """The engine that hangs at ``at``."""
    return hangs(_WAYS, series, name, at, seed, every=(30, 300), lasts=(1, 14))


def _piled(rng: random.Random, at: float) -> Curve:
    """Who waits: some come and stay, up to a bound."""
    comes, most = rng.uniform(0.05, 2.0), rng.uniform(5, 150)
    return lambda t: min(most, comes * max(0.0, t - at))


def _busy(rng: random.Random, at: float, then: float) -> Curve:
    """Processor time of which some cores are used, and ``then`` of them when the engine hangs."""
    cores = rng.uniform(0.8, 4)
    return lambda t: cores * min(t, at) + then * max(0.0, t - at)


def _queued(series: Series, count: int, waiting: Curve) -> Series:
    return queued(series, float(count), lambda t: count, waiting)


def _descriptors(series: Series, at: float, rng: random.Random) -> Series:
    return replace(series, unresponsive=lambda t: t >= at, cpu_s=_busy(rng, at, 0.02))


def _stopped(series: Series, at: float, rng: random.Random) -> Series:
    queued = _queued(series, rng.randint(3, 20), _piled(rng, at))
    return replace(queued, cpu_s=_busy(rng, at, 0.0))


def _reclaimed(series: Series, at: float, rng: random.Random) -> Series:
    """Its memory had gone up with its requests, and stays."""
    height, rises = rng.uniform(30, 250) * MIB, rng.uniform(60, 0.9 * at)
    queued = _queued(series, rng.randint(8, 30), _piled(rng, at))
    return replace(
        queued,
        other=lambda t: height * min(1.0, max(0.0, 1 - (at - t) / rises)),
        other_in="anonymous_other",
        cpu_s=_busy(rng, at, rng.uniform(0.1, 1.0)),
    )


def _mount(series: Series, at: float, rng: random.Random) -> Series:
    queued = _queued(series, rng.randint(1, 12), _piled(rng, at))
    adapters = until(lambda t: 0.01 * t, at)
    return replace(
        queued,
        cpu_s=_busy(rng, at, 0.02),
        counters=queued.counters | {"adapters_total": adapters},
    )


def _livelock(series: Series, at: float, rng: random.Random) -> Series:
    turn = rng.uniform(1.5, 9)

    def first(t: float) -> float:
        """One of the two runs, in name, and the other waits; else both do."""
        return 1.0 if t < at or t % turn < 0.5 * turn else 0.0

    return replace(
        series,
        load=lambda t: 2.0,
        cpu_s=_busy(rng, at, 1.0),
        counters={
            "running": lambda t: 2 * first(t) if t < at else first(t),
            "waiting": lambda t: 0.0 if t < at else 2 - first(t),
            "inflight": lambda t: 2,
            "kv_usage_ratio": lambda t: 0.5 + 0.45 * t / at if t < at else 0.96 + 0.03 * first(t),
            "prompt_tokens_total": until(lambda t: 1500 * t, at),
        },
    )


def _lost_device(series: Series, at: float, rng: random.Random) -> Series:
    """A few clients have no time limit, and stay."""
    count, stay, patience = rng.randint(10, 40), rng.randint(1, 4), rng.uniform(40, 400)

    def given_up(t: float) -> float:
        return math.floor((count - stay) * -math.expm1(-max(0.0, t - at) / patience))

    def running(t: float) -> float:
        return count - given_up(t)

    return replace(
        series,
        load=lambda t: float(count),
        cpu_s=_busy(rng, at, 1.0),
        counters={
            "running": running,
            "inflight": running,
            "aborted_total": lambda t: 0.01 * min(t, at) + given_up(t),
        },
    )


def _backtracking(series: Series, at: float, rng: random.Random) -> Series:
    queued = _queued(series, rng.randint(2, 16), _piled(rng, at))
    tokens = until(lambda t: 2200 * t, at)
    return replace(
        queued,
        cpu_s=_busy(rng, at, 1.0),
        counters=queued.counters | {"prompt_tokens_total": tokens},
    )


def _unresumed(series: Series, at: float, rng: random.Random) -> Series:
    """What ran has been put back to wait."""
    count, piled = rng.randint(6, 30), _piled(rng, at)
    return replace(
        series,
        load=lambda t: float(count),
        cpu_s=_busy(rng, at, 0.05),
        counters={
            "running": lambda t: count if t < at else 0,
            "waiting": lambda t: count + piled(t) if t >= at else 0,
            "inflight": lambda t: count + piled(t),
        },
    )


_WAYS: dict[str, Way] = {
    "descriptors": _descriptors,
    "stopped": _stopped,
    "reclaimed": _reclaimed,
    "mount": _mount,
    "livelock": _livelock,
    "lost device": _lost_device,
    "backtracking": _backtracking,
    "unresumed": _unresumed,
}
