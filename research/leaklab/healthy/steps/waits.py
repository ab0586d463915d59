"""What only looks like a hang: steps that wait, or that are seen late.

None is still for half a minute while it has work.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right

from leaklab.demand import drifting
from leaklab.healthy_runs import Spells, integral, short
from leaklab.series import HOUR, MIB, Build, Curve, Series, flat
from leaklab.views import BRIEF, habits

ENDS = BRIEF + HOUR
LONGEST_S = 18.0
"""Of what holds steps up."""


def _totals(times: list[float], each: float = 1.0) -> Curve:
    return lambda t: each * bisect_right(times, t)


def _turns(rng: random.Random, usual: float, spread: float) -> list[float]:
    """When steps end that take about as long as ``usual``."""
    ends, at = list[float](), 0.0
    while at < ENDS:
        at += min(LONGEST_S, usual * rng.lognormvariate(0, spread))
        ends.append(at)
    return ends


def _stepping(seed: int, ends: list[float], count: int, tokens: float, **more: object) -> Series:
    """An engine with so many requests, which tells its steps one by one."""
    counters: dict[str, Curve] = {
        "running": flat(float(count)),
        "inflight": flat(float(count)),
        "steps_total": _totals(ends),
        "requests_total": _totals(ends, count / 40),
        "generation_tokens_total": _totals(ends, tokens),
    }
    values = habits(seed) | {"read_every": 0.0, "fine": True, "load": flat(float(count)), **more}
    return short(seed, **values | {"counters": counters | values.get("counters", {})})


def _frozen_for_snapshots(seed: int) -> Series:
    """The processes are frozen for a snapshot, device and all, for up to a third of a minute. They
    use no processor then, and go on as if nothing had been."""
    rng = random.Random(seed)
    frozen, cores = Spells(rng, (200, 2400), (2, LONGEST_S), ENDS), rng.uniform(0.6, 3)
    return short(
        seed,
        **habits(seed)
        | {"cpu_s": integral(lambda t: cores * (not frozen.on(t)), ENDS), "read_every": 0.0},
        fine=True,
        paused=frozen.on,
        load=drifting(seed, 10, 1200),
    )


def _slow_clocks(seed: int) -> Series:
    """The device is hot, or its power is capped, and has a tenth of its clock: each step takes
    seconds for a quarter of an hour, and none at all otherwise."""
    rng = random.Random(seed)
    hot, ends, at = Spells(rng, (400, 4000), (100, 1500), ENDS), list[float](), 0.0
    cold, slows = rng.uniform(0.3, 1.5), rng.uniform(5, 14)
    while at < ENDS:
        at += min(LONGEST_S, cold * (slows if hot.on(at) else 1) * rng.uniform(0.8, 1.3))
        ends.append(at)
    count = rng.randint(4, 20)
    return _stepping(seed, ends, count, count)


def _streamed_layers(seed: int) -> Series:
    """The weights are larger than the device, and each layer comes from the host when it is next.
    A step takes as long as that of all layers, and a large batch makes it hardly longer."""
    rng = random.Random(seed)
    count = rng.randint(1, 48)
    return _stepping(
        seed,
        _turns(rng, rng.uniform(2, 13), 0.15),
        count,
        count,
        other=lambda t: 60 * MIB * (0.5 + 0.5 * math.sin(t)),
        other_in="anonymous_other",
    )


def _rendezvous(seed: int) -> Series:
    """Ranks begin a wave of steps together. Who has work waits for the one that still ends its
    last prompt: seconds, and a third of a minute for a long one."""
    rng = random.Random(seed)
    waits, count = Spells(rng, (5, 200), (0.5, LONGEST_S), ENDS), rng.randint(2, 12)
    comes = rng.uniform(0.1, 1.0)
    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        fine=True,
        paused=waits.on,
        load=flat(count + 1.0),
        counters={
            "running": flat(float(count)),
            "waiting": lambda t: comes * waits.since(t) if waits.on(t) else 0.0,
            "inflight": lambda t: count + (comes * waits.since(t) if waits.on(t) else 0.0),
        },
    )


def _remote_adapters(seed: int) -> Series:
    """An adapter that nobody has asked for lately is read over the network within a step, and all
    wait for it. Its file is on the host meanwhile."""
    rng = random.Random(seed)
    reads, size = Spells(rng, (40, 1500), (1, LONGEST_S), ENDS), rng.uniform(10, 350) * MIB
    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        fine=True,
        paused=reads.on,
        other=lambda t: size * min(1.0, reads.since(t) / LONGEST_S) * reads.on(t),
        other_in="anonymous_other",
        load=drifting(seed, 7, 600),
        counters={"adapters_total": integral(lambda t: 0.1 * reads.on(t), ENDS)},
    )


def _paced_speech(seed: int) -> Series:
    """Speech is made no faster than it is heard. While a listener has some seconds of it ahead the
    engine makes no step, though the request runs; then it makes the next seconds at once."""
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    ends = _turns(rng, rng.uniform(3, 12), 0.25)
    audios: dict[str, Curve] = {"audios_total": _totals(ends, 0.02)}
    return _stepping(seed, ends, count, 90, counters=audios)


def _batched_counters(seed: int) -> Series:
    """The worker tells the frontend what it has done each dozen seconds, in one message. Between
    two of them all that is known has stood still, with hundreds of steps behind it."""
    rng = random.Random(seed)
    every, count = rng.uniform(4, 16.5), rng.randint(3, 30)
    ends = [every * number for number in range(1, int(ENDS / every) + 2)]
    steps = rng.uniform(15, 60) * every
    counters: dict[str, Curve] = {"steps_total": _totals(ends, steps)}
    return _stepping(seed, ends, count, steps * count, counters=counters)


def _low_priority(seed: int) -> Series:
    """Some requests may wait until there is nothing else to do, and there is always something: the
    same number waits for hours, while those with a higher priority are served."""
    rng = random.Random(seed)
    waiting, count = rng.randint(1, 60), rng.randint(2, 9)
    pauses, held = Spells(rng, (60, 900), (1, 10), ENDS), rng.uniform(0.05, 2) * MIB
    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        fine=True,
        paused=pauses.on,
        other=lambda t: held * waiting,
        load=flat(float(count)),
        counters={
            "running": flat(float(count)),
            "waiting": flat(float(waiting)),
            "inflight": flat(float(count + waiting)),
        },
    )


def _compacted_by_the_kernel(seed: int) -> Series:
    """The worker asks for huge pages, and the kernel moves others about to make some. All steps
    wait for seconds, again and again for some minutes, with a processor busy in the kernel."""
    rng = random.Random(seed)
    short_of, moves = Spells(rng, (600, 5000), (60, 900), ENDS), Spells(rng, (2, 30), (1, 12), ENDS)
    grows = rng.uniform(20, 300) * MIB

    def moving(t: float) -> bool:
        return short_of.on(t) and moves.on(t)

    return short(
        seed,
        **habits(seed)
        | {"cpu_s": integral(lambda t: 0.8 + 1.0 * moving(t), ENDS), "read_every": 0.0},
        fine=True,
        paused=moving,
        other=lambda t: grows * min(1.0, short_of.since(t) / 300) * short_of.on(t),
        other_in="anonymous_other",
        load=drifting(seed, 9, 900),
    )


FAMILIES: dict[str, Build] = {
    "frozen for snapshots": _frozen_for_snapshots,
    "slow clocks": _slow_clocks,
    "streamed layers": _streamed_layers,
    "rendezvous": _rendezvous,
    "remote adapters": _remote_adapters,
    "paced speech": _paced_speech,
    "batched counters": _batched_counters,
    "low priority": _low_priority,
    "kernel compaction": _compacted_by_the_kernel,
}
