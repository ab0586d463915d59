"""What only looks like a leak: who asks, for what, and how it is answered.

Each is bounded as in ``host/kernels``.
"""

from __future__ import annotations

import math
import random

from leaklab.demand import between_steps, drifting, two_humps
from leaklab.healthy_runs import Spells, integral, levels, long, path
from leaklab.series import DAY, HOUR, MIB, Build, Series, diurnal
from leaklab.views import LONGEST, habits


def _compacted_contexts(seed: int) -> Series:
    """Some agents work all day. The context of each grows with what its tools have said, until it
    is summed up in a tenth. All begin when work begins, so their contexts grow together at first,
    and one by one later."""
    rng = random.Random(seed)
    phase, agents = rng.uniform(0, DAY), rng.randint(5, 16)
    most, turns = rng.uniform(150, 290) * MIB / agents, list[tuple[float, float]]()
    for _ in range(agents):
        turns.append((rng.uniform(0.4, 2.5) * HOUR, rng.uniform(0.05, 0.2)))

    def working(t: float) -> float:
        """How long all have worked today; nought by night."""
        since = (t + phase) % DAY
        return since if since < 11 * HOUR else 0.0

    def held(t: float) -> float:
        since = working(t)
        return sum(
            most * max(left if since > turn else 0.0, since % turn / turn) for turn, left in turns
        )

    return long(
        seed,
        **habits(seed),
        other=held,
        load=lambda t: float(agents) if working(t) else 1.5,
        counters={"prompt_tokens_total": integral(lambda t: 9000 * (working(t) > 0), LONGEST)},
    )


def _load_tests(seed: int) -> Series:
    """Someone tests how much the service can take: twice as many clients after each step of some
    minutes, until answers take too long. What they hold goes with them."""
    rng = random.Random(seed)
    tests, begins = list[tuple[float, float]](), 0.0
    step, day = rng.uniform(240, 1500), diurnal(3, 11)
    while begins < LONGEST:
        begins += rng.uniform(1.5, 14) * HOUR
        clients, total = 2.0, 0.0
        for _ in range(rng.randint(4, 6)):
            tests.append((begins, clients))
            total += clients
            clients, begins = total, begins + step
        tests.append((begins, -total))
    more = levels(tests)
    return long(
        seed,
        **habits(seed) | {"per_request": rng.uniform(2.5, 5) * MIB},
        load=lambda t: day(t) + more(t),
    )


def _growing_launch(seed: int) -> Series:
    """A new product is spoken about, and each day has half as many requests more than the one
    before. Memory goes with them, and has never been as high."""
    rng = random.Random(seed)
    day, grows = two_humps(2, 11, rng.uniform(0, DAY)), rng.uniform(0.25, 0.6)

    def load(t: float) -> float:
        return day(t) * (1 + grows * t / DAY)

    return long(
        seed,
        **habits(seed) | {"per_request": rng.uniform(3, 7) * MIB},
        load=load,
        counters={"generation_tokens_total": integral(lambda t: 55 * load(t), LONGEST)},
    )


def _moderated_answers(seed: int) -> Series:
    """Each answer is held until another service has looked at it, mostly for seconds. When that
    service is slow, hundreds are held, which the engine has done and its frontend has not given
    out; above a limit they are refused."""
    rng = random.Random(seed)
    slow = Spells(rng, (0.8 * HOUR, 8 * HOUR), (300, 2.5 * HOUR), LONGEST)
    load, limit = drifting(seed, 9, 2 * HOUR), rng.randint(200, 600)
    each, rate = rng.uniform(110, 280) * MIB / limit, rng.uniform(0.05, 0.5)
    held, points = 0.0, list[float]()
    for step in range(int(LONGEST / 30) + 1):
        change = rate if slow.on(30.0 * step) else -4 * rate
        held = min(float(limit), max(3.0, held + 30 * change))
        points.append(held)
    waits = between_steps(points, 30)
    return long(
        seed,
        **habits(seed),
        other=lambda t: each * waits(t),
        other_in="python_objects",
        load=load,
        counters={"inflight": lambda t: load(t) + waits(t)},
    )


def _live_events(seed: int) -> Series:
    """An event is transcribed and translated while it goes on, for two to five hours, in some
    dozen streams that begin and end together. What was said is kept until the event ends."""
    rng = random.Random(seed)
    events = Spells(rng, (2 * HOUR, 11 * HOUR), (1.5 * HOUR, 5 * HOUR), LONGEST)
    rate, streams = rng.uniform(30, 52) * MIB / HOUR, rng.randint(4, 16)
    closes, points = rng.uniform(20, 900), [(0.0, 0.0)]
    at = 0.0
    while at < LONGEST:
        at += 60
        if events.on(at):
            points.append((at, points[-1][1] + 60 * rate))
        elif points[-1][1]:
            points += [(at, points[-1][1]), (at + closes, 0.0)]
            at += closes
        else:
            points.append((at, 0.0))
    return long(
        seed,
        **habits(seed),
        other=path(points),
        load=lambda t: 4.0 + streams * events.on(t),
        counters={"audios_total": integral(lambda t: 0.1 * streams * events.on(t), LONGEST)},
    )


def _lessons(seed: int) -> Series:
    """A school works with an assistant in lessons of three quarters of an hour. A class that comes
    logs in, and each pupil's session stays until all are logged out in the afternoon."""
    rng = random.Random(seed)
    phase, lessons = rng.uniform(0, DAY), rng.randint(5, 8)
    each = rng.uniform(130, 280) * MIB / lessons
    classes = [rng.uniform(0.6, 1.4) for _ in range(3 * lessons + 8)]
    logs_in, logs_out = rng.uniform(120, 600), rng.uniform(1, 4) * HOUR

    def school(t: float) -> tuple[int, float, float]:
        """Which lesson it is, how long it has gone on, and how long the day."""
        since = (t + phase) % DAY - 8 * HOUR
        lesson, within = divmod(since, 55 * 60)
        return int(lesson), within, since

    def sessions(t: float) -> float:
        lesson, within, since = school(t)
        if since < 0 or since > lessons * 55 * 60 + logs_out:
            return 0.0
        first = int((t + phase) // DAY) * lessons
        come = classes[first : first + min(lesson, lessons)]
        now = classes[first + lesson] * min(1.0, within / logs_in) if lesson < lessons else 0.0
        return each * (sum(come) + now) / 1.2

    def load(t: float) -> float:
        lesson, within, since = school(t)
        return 22.0 if since > 0 and lesson < lessons and within < 45 * 60 else 1.0

    return long(seed, **habits(seed), other=sessions, other_in="python_objects", load=load)


def _fanned_out(seed: int) -> Series:
    """A question is split in a hundred parts, which are asked all at once and end one by one. The
    parts' answers are kept until the last has come and all are put together."""
    rng = random.Random(seed)
    at, parts, kept = 0.0, list[tuple[float, float]](), list[tuple[float, float]]()
    apart, each = rng.uniform(200, 2500), rng.uniform(0.4, 1.1)
    while at < LONGEST:
        at += rng.expovariate(1 / apart) + 30
        count, takes = rng.randint(30, 120), rng.uniform(8, 80)
        parts.append((at, float(count)))
        ends = [at + takes * min(5.0, rng.lognormvariate(-0.5, 0.7)) for _ in range(count)]
        parts += [(end, -1.0) for end in ends]
        kept += [(end, each * MIB) for end in ends]
        at = max(ends)
        kept.append((at + rng.uniform(1, 30), -count * each * MIB))
    more = levels(parts)
    return long(
        seed,
        **habits(seed) | {"per_request": rng.uniform(0.5, 1.5) * MIB},
        other=levels(kept),
        other_in="python_objects",
        load=lambda t: 3 + more(t),
    )


def _two_models(seed: int) -> Series:
    """A router sends what is hard to the engine's large model and what is easy elsewhere. It learns
    over days what is hard, and so the share of long answers here moves up and down slowly."""
    rng = random.Random(seed)
    share, day = drifting(seed, 0.4, rng.uniform(4, 14) * HOUR, 0.4), diurnal(4, 18)
    each, tau = rng.uniform(9, 16) * MIB, rng.uniform(300, 3000)

    def hard(t: float) -> float:
        return min(0.9, share(t))

    return long(
        seed,
        **habits(seed),
        other=lambda t: each * day(t - tau) * hard(t - tau) * (1 - math.exp(-t / tau)),
        load=day,
        counters={
            "generation_tokens_total": integral(lambda t: 100 * day(t) * hard(t), LONGEST),
        },
    )


def _renewed_by_night(seed: int) -> Series:
    """Whoever runs the service restarts its engine each night, as they always did. It loads for a
    minute or so, and what it sets up for its first users comes within the hours after."""
    rng = random.Random(seed)
    first, load = rng.uniform(1, 24) * HOUR, two_humps(3, 16, rng.uniform(0, DAY))
    opens, tau = rng.uniform(20, 110), rng.uniform(0.3, 3) * HOUR
    height, day = rng.uniform(100, 220) * MIB, rng.choice((1, 1, 0.5)) * DAY

    def lives(t: float) -> int:
        return 1 + max(0, math.ceil((t - first + 1e-9) / day))

    def age(t: float) -> float:
        return t if t < first else (t - first) % day

    return long(
        seed,
        **habits(seed),
        epoch=lives,
        ready_at=opens,
        other=lambda t: height * (1 - math.exp(-age(t) / tau)),
        load=lambda t: load(t) if age(t) > opens else 0.0,
    )


FAMILIES: dict[str, Build] = {
    "compacted contexts": _compacted_contexts,
    "load tests": _load_tests,
    "growing launch": _growing_launch,
    "moderated answers": _moderated_answers,
    "live events": _live_events,
    "lessons": _lessons,
    "fanned out": _fanned_out,
    "two models": _two_models,
    "renewed by night": _renewed_by_night,
}
