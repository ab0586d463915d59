"""How often is a slow leak seen where there is none, and how late where there is one?

    python -m bench.slow_leak            # writes research/bench/results/slow-leak.json
    python -m bench.slow_leak --quick    # a smoke test, nothing is written

The sidecar's detector judges series of ``leaklab`` in virtual time, as ``plimsoll replay`` does.
Healthy: every family of every split, the recorded memory of real processes, and what only shows
over weeks: random walks, daily load, caches that fill for days. Leaks: 1 to 48 MiB an hour under
noise of 10 to 60 MiB. A false condition is each time that one is raised in a healthy run.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

from bench.result import publish
from leaklab import recorded
from leaklab.cases import WARMUP_S, negatives
from leaklab.series import DAY, HOUR, LIMIT, MIB, Curve, Series, diurnal, saturating, steady
from leaklab.splits import Split
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_cli.figures import compute_percentile
from plimsoll_sidecar.detect.detector import Detector

NICE = 5
SEEDS = {Split.DEVELOPMENT: 2, Split.SEEN: 1, Split.TEST: 3}
RATES, NOISES = (1, 3, 6, 12, 24, 48), (10, 25, 60)
LEAK_SEEDS = 3
LEAK_HOURS = 120
LONG_DAYS = 14
LONG_INTERVAL_S = 60.0
BUDGET = MemoryBudget(512 * MIB, DAY, LIMIT)


@dataclass(frozen=True)
class Found:
    """One run: when the condition was raised, and for how many of its hours it stood."""

    name: str
    group: str
    hours: float
    raised_h: list[float]
    stood_h: float
    rate_mib_per_h: float = 0.0
    noise_mib: float = 0.0
    seen_mib_per_h: float | None = None


@dataclass(frozen=True)
class Play:
    """One run to judge. ``stop`` ends it once the condition is raised."""

    name: str
    group: str
    series: Series
    policy: MemoryPolicy
    rate: float = 0.0
    stop: bool = False


def judged(play: Play) -> Found:
    detector = Detector(play.policy, 30.0, play.series.interval)
    raised: list[float] = []
    stood, t, seen = 0.0, 0.0, None
    before: set[str] = set()
    for sample in play.series.samples():
        t = sample.t
        slow = detector.update(sample).slow
        now = {memory for memory, one in slow.items() if one.slow_leak}
        raised += [round(t / HOUR, 2) for _ in now - before]
        stood += play.series.interval / HOUR if now else 0.0
        before = now
        if now and play.stop:
            seen = next(one.bytes_per_s for one in slow.values() if one.slow_leak)
            break
    return Found(
        play.name,
        play.group,
        round(t / HOUR, 2),
        raised,
        round(stood, 2),
        play.rate,
        play.series.noise / MIB if play.rate else 0.0,
        None if seen is None else round(seen * HOUR / MIB, 3),
    )


def plays(quick: bool) -> list[Play]:
    made = [*_long(), *_recorded(), *_families(quick), *_leaks()]
    return made[::23] if quick else made


def _families(quick: bool) -> Iterator[Play]:
    for split, seeds in SEEDS.items():
        for case in negatives(split, 1 if quick else seeds):
            yield Play(case.name, split.value, case.series, case.policy)


def _recorded() -> Iterator[Play]:
    for case in recorded.slow(Split.TEST):
        name = case.name.removeprefix("recorded-")
        series = Series(
            duration=2 * DAY, interval=30.0, other=recorded.used(name), noise=0.0, per_request=0.0
        )
        yield Play(case.name, "recorded", series, case.policy)


def _long() -> Iterator[Play]:
    """What only shows over weeks."""
    policy = MemoryPolicy(host=BUDGET, warmup_s=WARMUP_S)
    shapes: dict[str, Callable[[int], dict[str, object]]] = {
        "random walk": lambda seed: {"other": _walk(seed, 10 * MIB)},
        "slow walk": lambda seed: {"other": _walk(seed, 3 * MIB)},
        "daily load": lambda seed: {"load": diurnal(2 + seed, 40 + 5 * seed)},
        "daily and weekly load": lambda seed: {"load": _week(seed)},
        "cache of a day": lambda seed: {"other": saturating(900 * MIB, (4 + 2 * seed) * HOUR)},
        "cache of days": lambda seed: {"other": saturating(900 * MIB, (12 + 6 * seed) * HOUR)},
        "pool that fills": lambda seed: {"other": _filled(300 * MIB, (6 + 3 * seed) * HOUR)},
    }
    for name, shape in shapes.items():
        for seed in range(4):
            series = Series(duration=LONG_DAYS * DAY, interval=LONG_INTERVAL_S, noise=25 * MIB,
                            seed=100 + seed, **shape(seed))  # type: ignore[arg-type]  # fmt: skip
            yield Play(f"{name}-{seed}", "weeks", series, policy)


def _walk(seed: int, per_hour: float) -> Curve:
    """A random walk without drift, whose deviation after an hour is ``per_hour``."""
    rng = random.Random(seed)
    path = [0.0]
    for _ in range(int(LONG_DAYS * DAY / LONG_INTERVAL_S) + 1):
        path.append(path[-1] + rng.gauss(0, per_hour * math.sqrt(LONG_INTERVAL_S / HOUR)))
    return lambda t: path[int(t / LONG_INTERVAL_S)]


def _week(seed: int) -> Curve:
    """Load of working days and of weekends."""
    day = diurnal(2, 30 + 5 * seed)
    return lambda t: day(t) * (0.3 if (t // DAY) % 7 >= 5 else 1.0)


def _filled(height: float, lasts: float) -> Curve:
    return lambda t: height * min(1.0, t / lasts)


def _leaks() -> Iterator[Play]:
    policy = MemoryPolicy(host=BUDGET, warmup_s=WARMUP_S)
    for rate in RATES:
        for noise in NOISES:
            for seed in range(LEAK_SEEDS):
                series = Series(duration=LEAK_HOURS * HOUR, interval=30.0, noise=noise * MIB,
                                leak=steady(rate * MIB / HOUR), seed=200 + seed)  # fmt: skip
                name = f"{rate} MiB/h under {noise} MiB-{seed}"
                yield Play(name, "leaks", series, policy, rate, stop=True)


def judge_all(made: list[Play], processes: int) -> list[Found]:
    # Series are made of functions without a name: a play travels by its number, to a process that
    # was forked with all of them.
    global _plays
    _plays = made
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, os.nice, (NICE,)) as pool:
        found = []
        for one in pool.map(_judge, range(len(made))):
            found.append(one)
            if one.raised_h and one.group != "leaks":
                print(one, flush=True)
        return found


_plays: list[Play] = []


def _judge(number: int) -> Found:
    return judged(_plays[number])


def summary(found: list[Found]) -> dict[str, float | int | None]:
    told: dict[str, float | int | None] = {}
    groups: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        groups[one.group].append(one)
    for group, runs in groups.items():
        if group == "leaks":
            continue
        told[f"{group}_hours_count"] = round(sum(one.hours for one in runs))
        told[f"{group}_false_count"] = sum(len(one.raised_h) for one in runs)
    quiet = [one for one in found if one.group != "leaks"]
    hours, false = sum(one.hours for one in quiet), sum(len(one.raised_h) for one in quiet)
    told["healthy_hours_count"], told["healthy_false_count"] = round(hours), false
    told["false_per_1000_hours_count"] = round(1000 * false / hours, 3) if hours else None
    told["false_standing_ratio"] = sum(one.stood_h for one in quiet) / hours if hours else None
    for rate in RATES:
        for noise in NOISES:
            runs = [one for one in groups["leaks"]
                    if (one.rate_mib_per_h, one.noise_mib) == (rate, noise)]  # fmt: skip
            times = [3600 * one.raised_h[0] for one in runs if one.raised_h]
            key = f"leak_{rate}_mib_per_hour_noise_{noise}_mib"
            told[f"{key}_missed_count"] = len(runs) - len(times)
            told[f"{key}_raised_s"] = compute_percentile(times, 0.5)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs, nothing is written")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    options = parser.parse_args()
    found = judge_all(plays(options.quick), options.jobs)
    told = summary(found)
    if options.quick:
        for key, value in told.items():
            print(f"{key:45} {value}")
        return
    publish("slow-leak", told, [_told(one) for one in found])


def _told(found: Found) -> dict[str, object]:
    """Of a healthy run nothing but what was seen of it: most have nothing to tell."""
    whole = asdict(found)
    return (
        whole
        if found.rate_mib_per_h
        else {key: value for key, value in whole.items() if value or key == "raised_h"}
    )


if __name__ == "__main__":
    main()
