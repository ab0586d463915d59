"""The cases of the leak lab: labelled series of each split."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from leaklab.budgets import limit_of, spending, window_of
from leaklab.editions import Edition, Watched
from leaklab.hangs import causes, requests, signs
from leaklab.leaks.basics import Mechanism
from leaklab.origins import Origin
from leaklab.series import (
    DAY,
    HOUR,
    LIMIT,
    MIB,
    Curve,
    Series,
    base_of,
    bursty,
    diurnal,
    flat,
    saturating,
    seed_of,
    square_load,
    steady,
)
from leaklab.shapes import SHARES
from leaklab.splits import EDITIONS, FAMILIES, LEAKS, Split
from leaklab.views import HANGS_S, begins, habits, interval_of
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy

WARMUP_S = 60.0
MAX_SAMPLES = 4000
"""Of one leak until its budget is spent: a slow leak is sampled less often, up to 30 s apart."""


@dataclass
class Case:
    """One labelled run. ``starts`` is when its leak or stall begins, None for a negative;
    ``trigger`` what a leak follows, where a run was made to ask that. ``origin`` says where the
    budget of a negative comes from, in editions in which it has one. ``limit`` is that of the
    host's memory in bytes."""

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
    limit: int = LIMIT

    @property
    def policy(self) -> MemoryPolicy:
        device = MemoryBudget(self.budget, self.window_s) if self.series.device else None
        return MemoryPolicy(
            host=MemoryBudget(self.budget, self.window_s, self.limit),
            device=device,
            warmup_s=WARMUP_S,
        )


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
    drawn = seed_of(edition.name, mechanism.name, rate, shape, seed)
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
        name, f"leak {mechanism.name}", split, series, mechanism.kind, starts, mechanism.segment,
        window_s=window_of(drawn, spent), limit=limit_of(series, budget, REACHED * budget, drawn),
    )  # fmt: skip


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
                seed=seed_of(EDITIONS[split][0].name, "named", name, seed),
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
    for good. Later ones are in ``hangs/``."""
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
        seed=seed_of(edition.name, "hang", name, seed),
    )
    if edition.alike:
        series = replace(
            series,
            **habits(series.seed),
            base=base_of(series.seed),
            fine=True,
            interval=HANGS_S[(seed + len(name)) % len(HANGS_S)],
        )
    for kinds in (requests, signs, causes):
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


def negatives(split: Split, seeds: int) -> list[Case]:
    """Each healthy family's runs."""
    cases, turn = [], 0
    for name, build in FAMILIES[split].items():
        for seed in range(seeds):
            if isinstance(build, Watched):
                series, origin = build.run(name, seed), build.origin(name, seed)
            else:
                series, origin = build(seed_of(split, name, seed)), None
            case = Case(f"{name}-{seed}", name, split, series, origin=origin)
            case.series = spending(series, case.budget)
            case.window_s, case.limit = window_of(turn), limit_of(case.series, case.budget, 0, turn)
            cases.append(case)
            turn += 1
    return cases
