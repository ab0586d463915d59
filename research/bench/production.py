"""Would the supervisor restart containers of production, with budgets that set themselves?

    python -m bench.production FOLDER [--learning 12]

Each file ``NAME.csv`` of the folder is a container: lines of seconds, bytes and, if known, the
memory limit in bytes. A file of the data set that ``aging_traces.py`` reads will do as well: its
limit is the machine's memory. The supervisor observes the first hours of each and judges the rest,
in mode ``Recover`` with ``growthBudget: Auto``, by the code of ``plimsoll replay``. A size that
falls below half of the one before belongs to another life; a life that ended at 95 % of its limit
died there.
Restarts have the exact interval of 95 % of a Poisson count. Writes ``production.json``.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, groupby
from pathlib import Path

from msgspec.structs import replace
from scipy.stats import chi2

from bench.result import publish
from leaklab.series import HOUR
from plimsoll_api.memory_policy import AutoBudgets, MemoryPolicy, parse_growth_budget
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_api.trace import Host, Sample
from plimsoll_sidecar.replay import ReplayLine, replay_samples

LEARNING_H = 12.0
WARMUP_S = 300.0
RESTARTED = 0.5
DIED_SHARE = 0.95
PER_H = 10_000.0
TIME, USED, TOTAL = "currentTime", "usedMemory", "totalMemory"
"""Columns of a file of that data set."""


@dataclass(frozen=True)
class Row:
    """One container. ``warned`` counts deaths with an incident in the same life before them."""

    name: str
    judged_hours: float
    suspected: int
    confirmed: int
    restarts: int
    deaths: int
    warned: int


def lives(points: Iterable[tuple[float, int, int | None]]) -> Iterator[Sample]:
    """Samples of the points: seconds, bytes and the limit, in order of time."""
    epoch, before = 1, 0
    for t, size, limit in points:
        if size < RESTARTED * before:
            epoch += 1
        before = size
        yield Sample(t=t, epoch=epoch, host=Host(rss_anon=size, processes=1, cgroup_limit=limit))


def read(file: Path) -> Iterator[tuple[float, int, int | None]]:
    """Points of a file. SystemExit for a line that is not seconds, bytes and a limit."""
    with file.open(newline="") as lines:
        rows = csv.reader(lines)
        first = next(rows, [])
        named = USED in first
        t, size, limit = map(first.index, (TIME, USED, TOTAL)) if named else range(3)
        for number, row in enumerate(rows if named else chain([first], rows), 1 + named):
            try:
                at = datetime.fromisoformat(row[t]).timestamp() if named else float(row[t])
                yield at, int(row[size]), int(row[limit]) if row[limit:] and row[limit] else None
            except (IndexError, ValueError):
                raise SystemExit(f"{file}:{number}: not seconds, bytes and a limit") from None


def judged(name: str, samples: Sequence[Sample], learning_s: float) -> Row:
    """What the supervisor would have done to a container after it had observed it."""
    limits = [s.host.cgroup_limit for s in samples if s.host.cgroup_limit]
    budget = replace(parse_growth_budget("Auto"), limit_bytes=limits[-1] if limits else None)
    auto = AutoBudgets(learning_s=learning_s)
    policy = MemoryPolicy(host=budget, warmup_s=WARMUP_S, auto=auto)
    interval_s = (samples[-1].t - samples[0].t) / max(1, len(samples) - 1)
    told = replay_samples(samples, policy, Supervision(mode=Mode.RECOVER), interval_s, name)
    lines = [line for line in told if isinstance(line, ReplayLine)]
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
    return Row(
        name,
        round(max(0.0, samples[-1].t - begins) / HOUR, 2),
        sum(line.event == "incident" for line in late),
        sum(line.event == "confirmed" for line in late),
        sum(line.action not in (None, Action.TRIM.value) for line in late),
        deaths,
        warned,
    )


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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with a file NAME.csv for each container")
    parser.add_argument("--learning", type=float, default=LEARNING_H, help="hours of observation")
    options = parser.parse_args()
    rows = []
    for file in sorted(options.folder.glob("*.csv")):
        samples = list(lives(read(file)))
        if len(samples) > 1:
            rows.append(judged(file.stem, samples, options.learning * HOUR))
            print(rows[-1], flush=True)
    if not rows:
        raise SystemExit(f"{options.folder} has no series")
    publish("production", figures(rows), [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
