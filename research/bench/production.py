"""Would the supervisor restart containers of production, with budgets that set themselves?

    python -m bench.production FOLDER [--learning 12]

Each file ``NAME.csv`` of the folder is a container: lines of seconds, bytes and, if known, the
memory limit in bytes. Two public data sets are read as they are:

- that of ``aging_traces.py``; the limit is the machine's memory
- the pods of Nezha (Yu et al., FSE 2023; github.com/IntelligentDDS/Nezha, ``rca_data/*/metric``):
  two systems of microservices, sampled once a minute. The pods of one workload follow each other.

The supervisor observes the first hours of each and judges the rest, in mode ``Recover`` with
``growthBudget: Auto``, by the code of ``plimsoll replay``. A size that falls below half of the one
before belongs to another life, as does another pod; a life that ended at 95 % of its limit died
there. A pause of more than ten minutes is not judged. Each container is judged once more with a
leak in its last life, two hours after the start or the learning, that would reach the limit four
hours later: budgets so large that nothing is ever found would restart nothing either.

Restarts have the exact interval of 95 % of a Poisson count. Writes ``production.json``.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, groupby, pairwise
from pathlib import Path

from msgspec.structs import replace
from scipy.stats import chi2

from bench.result import publish
from leaklab.series import HOUR
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import AutoBudgets, MemoryPolicy, parse_growth_budget
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_api.trace import Host, Sample
from plimsoll_sidecar.replay import ReplayLine, replay_samples

LEARNING_H = 12.0
WARMUP_S = 300.0
RESTARTED = 0.5
DIED_SHARE = 0.95
PER_H = 10_000.0
PAUSE_S = 600.0
BEFORE_LEAK_S, LEAK_S = 2 * HOUR, 4 * HOUR
MIB = 1 << 20
TIME, USED, TOTAL = "currentTime", "usedMemory", "totalMemory"
"""Columns of the first data set."""
POD, POD_TIME, POD_MIB, POD_PERCENT = "PodName", "Time", "MemoryUsage(Mi)", "MemoryUsageRate(%)"
"""Columns of the second one. The limit follows from the two figures of a line."""
POD_SUFFIX = re.compile(r"-[0-9a-f]{8,10}-[0-9a-z]{5}$")
Point = tuple[float, int, int | None]
"""Seconds, bytes and the limit in bytes."""


@dataclass(frozen=True)
class Row:
    """One container. ``warned`` counts deaths with an incident in the same life before them.

    ``leak_confirmed`` and ``leak_restarted`` are of the leak that was added; None if none was.
    """

    name: str
    judged_hours: float
    suspected: int
    confirmed: int
    restarts: int
    deaths: int
    warned: int
    leak_confirmed: bool | None = None
    leak_restarted: bool | None = None


def lives(points: Iterable[Point], first_epoch: int = 1) -> Iterator[Sample]:
    """Samples of the points, in order of time."""
    epoch, before = first_epoch, 0
    for t, size, limit in points:
        if size < RESTARTED * before:
            epoch += 1
        before = size
        yield Sample(t=t, epoch=epoch, host=Host(rss_anon=size, processes=1, cgroup_limit=limit))


def read(file: Path) -> tuple[str, list[Point]]:
    """The name of the container and its points. SystemExit for a line that is none."""
    with file.open(newline="") as lines:
        rows = csv.reader(lines)
        first = next(rows, [])
        point, headed = _format(first)
        name, points = file.stem, []
        for number, row in enumerate(rows if headed else chain([first], rows), 1 + headed):
            try:
                if POD in first:
                    name = POD_SUFFIX.sub("", row[first.index(POD)])
                points.append(point(row))
            except (IndexError, ValueError):
                raise SystemExit(f"{file}:{number}: not seconds, bytes and a limit") from None
    return name, [one for one in points if one[1]]  # 0: the container was not measured


def _format(first: list[str]) -> tuple[Callable[[list[str]], Point], bool]:
    """How the lines of a file are read, and whether the first one names the columns."""
    if USED in first:
        t, size, limit = map(first.index, (TIME, USED, TOTAL))
        return lambda row: (_seconds(row[t]), int(row[size]), int(row[limit])), True
    if POD in first:
        t, size, limit = map(first.index, (POD_TIME, POD_MIB, POD_PERCENT))
        return lambda row: (
            _seconds(f"{row[t][:19]}+00:00"),
            int(MIB * float(row[size] or 0)),
            round(100 * MIB * float(row[size]) / float(row[limit]))
            if float(row[limit] or 0)
            else None,
        ), True
    return lambda row: (
        float(row[0]),
        int(row[1]),
        int(row[2]) if row[2:] and row[2] else None,
    ), False


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def series(folder: Path) -> dict[str, list[Sample]]:
    """The samples of each container of a folder: one pod of a workload after the other."""
    found: dict[str, list[list[Point]]] = defaultdict(list)
    for file in sorted(folder.glob("*.csv")):
        name, points = read(file)
        if points:
            found[name].append(points)
    samples: dict[str, list[Sample]] = {}
    for name, pods in found.items():
        samples[name] = []
        for points in sorted(pods):
            epoch = samples[name][-1].epoch + 1 if samples[name] else 1
            samples[name] += lives(points, epoch)
    return samples


def replayed(name: str, samples: Sequence[Sample], learning_s: float) -> list[ReplayLine]:
    """What the supervisor says of growth in a container that it also learns from."""
    budget = replace(parse_growth_budget("Auto"), limit_bytes=find_limit(samples))
    policy = MemoryPolicy(host=budget, warmup_s=WARMUP_S, auto=AutoBudgets(learning_s=learning_s))
    interval_s = (samples[-1].t - samples[0].t) / max(1, len(samples) - 1)
    told = replay_samples(samples, policy, Supervision(mode=Mode.RECOVER), interval_s, name)
    lines = [line for line in told if isinstance(line, ReplayLine)]
    return [line for line in lines if line.kind != IncidentKind.ENGINE_CRASH]


def find_limit(samples: Sequence[Sample]) -> int | None:
    """The newest memory limit in bytes."""
    return next((s.host.cgroup_limit for s in reversed(samples) if s.host.cgroup_limit), None)


def with_leak(samples: Sequence[Sample], since: float, limit: int) -> Iterator[Sample]:
    """The samples with a leak from ``since`` on, until the container reaches its limit."""
    last = [s.host.rss_anon or 0 for s in samples if s.epoch == samples[-1].epoch]
    pace = (limit - max(last)) / LEAK_S
    for sample in samples:
        leaked = int(pace * max(0.0, sample.t - since))
        size = (sample.host.rss_anon or 0) + leaked
        if leaked and size >= limit:
            return
        yield replace(sample, host=replace(sample.host, rss_anon=size))


def is_restart(line: ReplayLine) -> bool:
    return line.action not in (None, Action.TRIM.value)


def judged(name: str, samples: Sequence[Sample], learning_s: float) -> Row:
    """What the supervisor would have done to a container after it had observed it."""
    lines = replayed(name, samples, learning_s)
    begins = samples[0].t + learning_s
    late = [line for line in lines if line.t >= begins]
    opened = [line.t for line in lines if line.event == "incident"]
    deaths = warned = 0
    for _, group in groupby(samples, key=lambda sample: sample.epoch):
        life = list(group)
        first, last = life[0].t, life[-1].t
        limit = life[-1].host.cgroup_limit
        if limit is not None and (life[-1].host.rss_anon or 0) >= DIED_SHARE * limit:
            deaths += 1
            warned += any(first <= t <= last for t in opened)
    steps = [new.t - old.t for old, new in pairwise(samples) if new.t > begins]
    return Row(
        name,
        round(sum(step for step in steps if step <= PAUSE_S) / HOUR, 2),
        sum(line.event == "incident" for line in late),
        sum(line.event == "confirmed" for line in late),
        sum(map(is_restart, late)),
        deaths,
        warned,
        *judged_with_leak(name, samples, learning_s),
    )


def judged_with_leak(
    name: str, samples: Sequence[Sample], learning_s: float
) -> tuple[bool | None, bool | None]:
    """Whether a leak in the last life is confirmed, and restarted; None if it has no room."""
    limit = find_limit(samples)
    newest = next(sample.t for sample in samples if sample.epoch == samples[-1].epoch)
    since = max(samples[0].t + learning_s, newest) + BEFORE_LEAK_S
    if limit is None or samples[-1].t < since + LEAK_S:
        return None, None
    lines = replayed(name, list(with_leak(samples, since, limit)), learning_s)
    late = [line for line in lines if line.t > since]
    return any(line.event == "confirmed" for line in late), any(map(is_restart, late))


def figures(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """The figures of the result."""
    hours, count = sum(row.judged_hours for row in rows), sum(row.restarts for row in rows)
    low = chi2.ppf(0.025, 2 * count) / 2 if count else 0.0
    high = chi2.ppf(0.975, 2 * count + 2) / 2
    rate = PER_H / hours if hours else None
    return {
        "containers_count": len(rows),
        "judged_hours": round(hours, 1),
        "suspected_count": sum(row.suspected for row in rows),
        "confirmed_count": sum(row.confirmed for row in rows),
        "restarts_count": count,
        "restarts_per_10000_hours_count": None if rate is None else round(count * rate, 2),
        "restarts_per_10000_hours_low_count": None if rate is None else round(low * rate, 2),
        "restarts_per_10000_hours_high_count": None if rate is None else round(high * rate, 2),
        "deaths_count": sum(row.deaths for row in rows),
        "deaths_warned_count": sum(row.warned for row in rows),
        "leaks_added_count": sum(row.leak_confirmed is not None for row in rows),
        "leaks_added_confirmed_count": sum(row.leak_confirmed is True for row in rows),
        "leaks_added_restarted_count": sum(row.leak_restarted is True for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with a file NAME.csv for each container")
    parser.add_argument("--learning", type=float, default=LEARNING_H, help="hours of observation")
    options = parser.parse_args()
    rows = []
    for name, samples in series(options.folder).items():
        if len(samples) > 1:
            rows.append(judged(name, samples, options.learning * HOUR))
            print(rows[-1], flush=True)
    if not rows:
        raise SystemExit(f"{options.folder} has no series")
    publish("production", figures(rows), [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
