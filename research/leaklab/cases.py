"""The cases of the leak lab: labelled series, split by mechanism into development and test.

The detector's constants may be chosen on the development split, and on what was seen: the earlier
test splits, which are no test any more since they were looked at, and are kept for their figures.
No mechanism is in two splits: a family such as "garbage collection" has another one in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from leaklab import editions, hangs_causes, hangs_seen, hangs_unseen
from leaklab.editions import Edition
from leaklab.leaks_known import Mechanism
from leaklab.origins import Origin, origin_of
from leaklab.series import (
    GIB,
    MIB,
    Curve,
    Series,
    bursty,
    diurnal,
    flat,
    saturating,
    square_load,
    steady,
)
from leaklab.shapes import SHARES
from leaklab.views import HANGS_S, begins, habits, interval_of, viewed
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy

HOUR = 3600.0
DAY = 24 * HOUR
WARMUP_S = 60.0
LIMIT = 6 * GIB
MAX_SAMPLES = 4000
"""Of one leak until its budget is spent: a slow leak is sampled less often, up to 30 s apart."""


class Split(StrEnum):
    DEVELOPMENT = "development"
    SEEN = "seen"
    TEST = "test"


@dataclass
class Case:
    """One labelled run. ``starts`` is when its leak or stall begins, None for a negative;
    ``trigger`` what a leak follows, where a run was made to ask that. ``origin`` says where the
    budget of a negative comes from, in editions in which it has one."""

    name: str
    family: str
    split: Split
    series: Series
    kind: str | None = None
    starts: float | None = None
    segment: str | None = None
    trigger: str | None = None
    origin: Origin | None = None
    budget: int = 512 * MIB
    window_s: float = DAY

    @property
    def policy(self) -> MemoryPolicy:
        device = MemoryBudget(self.budget, self.window_s) if self.series.device else None
        return MemoryPolicy(
            host=MemoryBudget(self.budget, self.window_s, LIMIT), device=device, warmup_s=WARMUP_S
        )


EDITIONS = {
    Split.DEVELOPMENT: (editions.DEVELOPMENT,),
    Split.SEEN: (editions.EARLIER, editions.NINTH, editions.TENTH),
    Split.TEST: (editions.ELEVENTH,),
}
LEAKS = {
    split: tuple(mechanism for edition in of for mechanism in edition.mechanisms)
    for split, of in EDITIONS.items()
}
REACHED = 1.25
"""The share of its budget that a leak has spent at the end of its run. Where runs are alike each
one has done so to the byte or more; in earlier editions some have spent a little less."""
FILLS_S = 1500.0
"""The time constant in which an accounted cache fills."""
FOLLOWED = {
    "tokens": ("generation_tokens_total", 900.0, "swells"),
    "pictures": ("images_total", 1.5, "spells"),
    "aborts": ("aborted_total", 0.4, "renewed"),
    "prompts": ("prompt_tokens_total", 4000.0, "swells"),
    "errors": ("errors_total", 0.3, "crowds"),
    "audios": ("audios_total", 0.6, "spells"),
    "adapters": ("adapters_total", 0.05, "jittered"),
    "prefixes": ("distinct_prompts_total", 2.2, "telegraph"),
    "preemptions": ("preemptions_total", 0.2, "overflow"),
}
"""The counter that a leak follows, its mean a second, and how it grows."""
AT_REST = {"load", "bursty", *FOLLOWED}
"""The shapes of what does not vary within the time of a fast leak."""


def leaks(split: Split, seeds: int) -> list[Case]:
    """Mechanism x rate x shape x seed."""
    return [
        _leak(split, edition, mechanism, rate, shape, seed)
        for edition in EDITIONS[split]
        for mechanism in edition.mechanisms
        for rate in edition.spent_s
        for shape in mechanism.shapes or edition.shapes
        for seed in range(seeds)
        if rate != "fast" or shape not in AT_REST
    ]


def _leak(
    split: Split, edition: Edition, mechanism: Mechanism, rate: str, shape: str, seed: int
) -> Case:
    budget, spent = 512 * MIB, edition.spent_s[rate]
    name = f"{mechanism.name}-{rate}-{shape}-{seed}"
    drawn = _seed(edition.name, mechanism.name, rate, shape, seed)
    starts = 300.0 if shape != "late" else 300.0 + 2 * max(spent, 600.0)
    if edition.alike:
        starts = begins(drawn, spent, shape == "late")
    length = starts + REACHED * spent
    per_s = budget / spent
    series = Series(
        duration=length,
        interval=min(30.0, max(1.0, round(length / MAX_SAMPLES))),
        segment=mechanism.segment,
        role=mechanism.role,
        malloc=mechanism.malloc,
        device=mechanism.kind == "DeviceGrowth",
        noise=mechanism.noises[seed % len(mechanism.noises)],
        base=base_of(seed),
        load=mechanism.load,
        seed=drawn,
    )
    if edition.alike:
        interval = interval_of(rate, drawn + len(name))
        series = replace(series, **habits(drawn), interval=interval, base=base_of(drawn))
    series = replace(series, **mechanism.beside)
    if mechanism.accounted:
        series.other = series.ledger = saturating(mechanism.accounted, FILLS_S, WARMUP_S)
        series.ledger_bound = int(mechanism.accounted)
    match shape:
        case "load":
            low, high, turns = edition.swells
            series.load = square_load(low, high, spent / turns)
            series.leak_per_request, series.leak_from = per_s / series.requests_per_s, starts
        case "bursty":
            count, share = edition.bursts
            pulses = bursty(per_s, spent / count, share)
            series.leak = lambda t: pulses(max(0.0, t - starts))
        case "steady" | "late":
            series.leak = steady(per_s, starts)
        case _ if shape in FOLLOWED:
            counter, mean, grows = FOLLOWED[shape]
            come = SHARES[grows](series.seed)
            total: Curve = lambda t: mean * spent * come(t / spent)  # noqa: E731
            until, part = (length, REACHED) if edition.alike else (starts + spent, 1.0)
            each = part * budget / (total(until) - total(starts))
            series.leak = lambda t: each * max(0.0, total(t) - total(starts))
            series.counters = {counter: total}
        case _:
            grown = SHARES[shape](series.seed)
            full = budget * REACHED / grown(REACHED) if edition.alike else budget
            series.leak = lambda t: full * grown(max(0.0, t - starts) / spent)
    if edition.alike:
        series.duration += 2 * series.interval
    return Case(
        name, f"leak {mechanism.name}", split, series, mechanism.kind, starts, mechanism.segment
    )


def named(split: Split) -> list[Case]:
    """The two rates that are promised: 400 MB a minute, and 48 MiB an hour in 6 GiB under noise."""
    mechanism = LEAKS[split][0]
    cases = []
    for seed in range(5):
        for name, rate, length, noise in (
            ("fast", 400e6 / 60, 200.0, 8 * MIB),
            ("slow", 48 * MIB / HOUR, 4 * HOUR, 60 * MIB),
        ):
            series = Series(
                duration=300 + length,
                leak=steady(rate, 300.0),
                noise=noise,
                segment=mechanism.segment,
                role=mechanism.role,
                seed=_seed(EDITIONS[split][0].name, "named", name, seed),
            )
            cases.append(
                Case(
                    f"named-{name}-{seed}",
                    f"leak named {name}",
                    split,
                    series,
                    mechanism.kind,
                    300.0,
                    mechanism.segment,
                )
            )
    return cases


USUAL_PAUSE_S = 6.0
"""One step in a hundred or so takes this long in the services that hang."""


HANGS = {
    split: {name for edition in of for name in edition.hangs} for split, of in EDITIONS.items()
}
"""Their names."""
WOKEN_S = 45.0
"""From the end of its sleep until a woken engine hangs."""
FLAPS_S, FLAP_S = 330.0, 18.0
"""From one loss of a link to the next, and until it is there again."""


def stalls(split: Split) -> list[Case]:
    """A worker that hangs under load, soon after its start or with a history of its steps, and a
    frontend that hangs: it answers nobody, and what the worker does is not known. Few requests are
    in flight where a link to a peer is lost by night; an engine that was woken hangs in its first
    collective, for one rank sleeps on. A scheduler starves that counts blocks as taken which nobody
    has: all requests wait and none is run. Behind a kernel that never ends requests pile up, until
    as many clients give up as come. A link that flaps is lost for seconds at a time, and at last
    for good. Later ones are in ``hangs_seen``, ``hangs_causes`` and ``hangs_unseen``."""
    met: Counter[str] = Counter()
    cases = []
    for edition in EDITIONS[split]:
        for name, at in edition.hangs.items():
            for seed in range(5):
                case = _stall(split, edition, name, at + 7 * seed, seed)
                case.name = f"hang-{name}-{met[name] + seed}"
                cases.append(case)
            met[name] += 5
    return cases


def _stall(split: Split, edition: Edition, name: str, at: float, seed: int) -> Case:
    series = Series(
        duration=at + 500,
        paused=lambda t: t % 100 < USUAL_PAUSE_S,
        seed=_seed(edition.name, "hang", name, seed),
    )
    if edition.alike:
        series = replace(
            series,
            **habits(series.seed),
            base=base_of(series.seed),
            fine=True,
            interval=HANGS_S[(seed + len(name)) % len(HANGS_S)],
        )
    for kinds in (hangs_seen, hangs_causes, hangs_unseen):
        if name in kinds.TIMES:
            series = kinds.hanging(series, name, at, seed)
    if name == "few":
        series.load = flat(4.0)
    if name == "woken":
        series.load = lambda t: 0.0 if 600 <= t < at - WOKEN_S else 11.0
    if name == "starved":
        waiting: Curve = lambda t: min(90.0, 10 + 0.7 * (t - at)) if t >= at else 0.0  # noqa: E731
        series.counters = {
            "running": lambda t: 0 if t >= at else 10,
            "waiting": waiting,
            "inflight": lambda t: waiting(t) if t >= at else 10,
        }
    if name == "piling":
        piled: Curve = lambda t: min(300.0, 5 * max(0.0, t - at))  # noqa: E731
        series.counters = {"waiting": piled, "inflight": lambda t: 8 + piled(t)}
        series.other = lambda t: 0.2 * MIB * piled(t)
    if name == "flapping":
        series.paused = lambda t: t % 100 < USUAL_PAUSE_S or (t > 600 and t % FLAPS_S < FLAP_S)
    if name == "frontend":
        series.unresponsive = lambda t: t >= at
    else:
        series.frozen_at = at
    return Case(f"hang-{name}-{seed}", f"stall {name}", split, series, "Stall", at)


def saturation() -> Case:
    """72 hours in which work waits all the time and is done, with steps of ten seconds each hour,
    and a prompt of 60,000 tokens each seven hours that takes 25 seconds."""
    every = 7 * HOUR
    series = Series(
        duration=72 * HOUR,
        interval=5,
        load=diurnal(40, 60),
        paused=lambda t: t % HOUR < 10 or (t > every and t % every < 25),
        counters={"prompt_tokens_total": lambda t: 4000 * t + 60_000 * (t // every)},
        seed=72,
    )
    return Case("saturation", "saturation", Split.TEST, series)


def base_of(seed: int) -> float:
    """Engines fill very different shares of their limit."""
    return (2.0, 3.2, 4.2)[seed % 3] * GIB


def _seed(*parts: Any) -> int:
    """The same in every process, unlike hash()."""
    return sum((place + 1) * 31 * ord(c) for place, c in enumerate("/".join(map(str, parts))))


Build = Callable[[int], Series]
"""A negative series from its seed."""


@dataclass(frozen=True)
class Watched:
    """A family whose runs are watched in several ways in turn, from that of its ``place`` in its
    edition on."""

    build: Build
    edition: Edition
    place: int

    def __call__(self, seed: int) -> Series:
        return self.build(seed)

    def seed(self, name: str, number: int) -> int:
        return _seed(self.edition.name, name, number)

    def run(self, name: str, number: int) -> Series:
        return viewed(self.build(self.seed(name, number)), self.place + number)

    def origin(self, name: str, number: int) -> Origin | None:
        return origin_of(self.seed(name, number)) if self.edition.observed else None


def watched(edition: Edition, families: dict[str, Build]) -> dict[str, Build]:
    """The same families, watched alike with the leaks of their edition."""
    return {
        name: Watched(build, edition, place) for place, (name, build) in enumerate(families.items())
    }


def negatives(split: Split, seeds: int, families: dict[Split, dict[str, Build]]) -> list[Case]:
    """Each family's runs."""
    cases = []
    for name, build in families[split].items():
        for seed in range(seeds):
            if isinstance(build, Watched):
                series, origin = build.run(name, seed), build.origin(name, seed)
            else:
                series, origin = build(_seed(split, name, seed)), None
            cases.append(Case(f"{name}-{seed}", name, split, series, origin=origin))
    return cases
