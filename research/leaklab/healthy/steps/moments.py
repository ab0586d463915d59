"""What only looks like a hang: engines that make no step for some seconds.

None is still for half a minute, but where the engine says itself what it waits for.
"""

from __future__ import annotations

import math
import random

from leaklab.demand import drifting
from leaklab.healthy_runs import Spells, integral, levels, short
from leaklab.series import GIB, HOUR, MIB, Build, Series, flat
from leaklab.views import BRIEF, habits

ENDS = BRIEF + HOUR


def _captured_anew(seed: int) -> Series:
    """Graphs of the steps are captured anew when adapters come or go, for each size of a batch.
    Requests wait for that, up to twenty seconds, and the processor is busy."""
    rng = random.Random(seed)
    captures = Spells(rng, (120, 1500), (5, 21), ENDS)
    scratch, busy = rng.uniform(20, 120) * MIB, integral(lambda t: 0.9 + captures.on(t), ENDS)
    return short(
        seed,
        **habits(seed) | {"cpu_s": busy, "read_every": 0.0},
        fine=True,
        paused=captures.on,
        other=lambda t: scratch * captures.on(t),
        load=drifting(seed, 9, 900),
        counters={"adapters_total": integral(lambda t: 0.02 * captures.on(t), ENDS)},
    )


def _full_decoders(seed: int) -> Series:
    """A prefiller keeps what it made until a decoder has room for it. While all decoders are full
    it has no room either: its requests count as running, more of them wait, and it makes no
    step."""
    rng = random.Random(seed)
    full, count = Spells(rng, (60, 700), (4, 22), ENDS), rng.randint(4, 16)
    comes = rng.uniform(0.2, 1.5)

    def waiting(t: float) -> float:
        since = full.since(t)
        return comes * since if full.on(t) else 2.0

    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        fine=True,
        paused=full.on,
        load=flat(float(count)),
        counters={
            "running": flat(float(count)),
            "waiting": waiting,
            "inflight": lambda t: count + waiting(t),
            "kv_usage_ratio": lambda t: 0.99 if full.on(t) else 0.7 + 0.1 * math.sin(t / 60),
        },
    )


def _decoded_before(seed: int) -> Series:
    """The frontend decodes a video before the engine is asked anything. Where all requests are
    videos they are taken in, and neither run nor wait, for up to twenty seconds."""
    rng = random.Random(seed)
    decodes, count = Spells(rng, (15, 200), (5, 22), ENDS), rng.randint(1, 4)
    frames = rng.uniform(60, 250) * MIB
    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        fine=True,
        other=lambda t: frames * min(1.0, decodes.since(t) / 20) * decodes.on(t),
        other_in="anonymous_other",
        load=lambda t: 0.0 if decodes.on(t) else float(count),
        counters={
            "inflight": flat(float(count)),
            "images_total": integral(lambda t: 3.0 * decodes.on(t), ENDS),
        },
    )


def _compiled_first(seed: int) -> Series:
    """All requests of the moment wait until their schema is compiled, for up to a minute and a
    half. The engine says that they do, and its processor is busy."""
    rng = random.Random(seed)
    compiles, count = Spells(rng, (300, 2000), (10, 90), ENDS), rng.randint(1, 8)
    busy = integral(lambda t: 2.2 if compiles.on(t) else 0.8, ENDS)
    scratch = rng.uniform(60, 300) * MIB

    def compiling(t: float) -> float:
        return count * compiles.on(t)

    return short(
        seed,
        **habits(seed) | {"cpu_s": busy, "read_every": 0.0},
        fine=True,
        paused=compiles.on,
        other=lambda t: scratch * min(1.0, compiles.since(t) / 40) * compiles.on(t),
        load=flat(count + 2.0),
        counters={
            "running": lambda t: count - compiling(t),
            "waiting": compiling,
            "compiling": compiling,
            "inflight": flat(float(count)),
        },
    )


def _blocking_copies(seed: int) -> Series:
    """A long conversation is copied to the host at once, and the step waits for the copy. The tier
    on the host accounts for it, and drops an old one where it has no room."""
    rng = random.Random(seed)
    bound, held, kept = rng.uniform(0.5, 1.1) * GIB, 0.0, list[float]()
    copies, changes, at = list[tuple[float, float]](), list[tuple[float, float]](), 0.0
    while at < ENDS:
        at += rng.uniform(30, 500)
        size, lasts = rng.uniform(40, 240) * MIB, rng.uniform(2, 14)
        while held + size > bound:
            held -= kept[0]
            changes.append((at, -kept.pop(0)))
        kept.append(size)
        held += size
        copies += [(at, 1.0), (at + lasts, -1.0)]
        at += lasts
        changes.append((at, size))
    tier, copying = levels(changes), levels(copies)
    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        fine=True,
        paused=lambda t: copying(t) > 0,
        other=tier,
        other_in="anonymous_other",
        ledger=tier,
        ledger_bound=int(bound),
        load=flat(float(rng.randint(3, 12))),
    )


def _unread_answers(seed: int) -> Series:
    """Answers go out by a queue with few places. When a client does not read, the queue is full,
    and the engine makes no step until there is a place again or the client is given up."""
    rng = random.Random(seed)
    full, count = Spells(rng, (50, 900), (3, 20), ENDS), rng.randint(2, 9)
    queue, aborts = rng.uniform(10, 90) * MIB, rng.uniform(0.01, 0.05)
    return short(
        seed,
        **habits(seed) | {"read_every": 0.0},
        fine=True,
        paused=full.on,
        other=lambda t: queue * full.on(t),
        load=flat(count + 2.0),
        counters={
            "running": flat(float(count)),
            "inflight": flat(float(count)),
            "aborted_total": integral(lambda t: aborts * full.on(t), ENDS),
        },
    )


FAMILIES: dict[str, Build] = {
    "captured anew": _captured_anew,
    "full decoders": _full_decoders,
    "decoded before": _decoded_before,
    "compiled first": _compiled_first,
    "blocking copies": _blocking_copies,
    "unread answers": _unread_answers,
}
