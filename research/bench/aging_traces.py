"""What the detector says about nine public runs of small models, 53 to 85 hours each.

    git clone https://github.com/chas42/llm-software-aging-research DIR
    python -m bench.aging_traces DIR

The runs are by Santos et al. (MIT licence, 2024): GPT-Neo 125M, OPT 125M and Pythia 160M behind a
socket on a desktop, with a request every 1, 5 or 10 seconds, recorded once a minute. The only
memory in the files is the whole machine's used memory, so the desktop's programs count too, and
nobody labelled the runs: the authors report growth in all of them. Their request rate is taken
from the file's name, because the files have no count of requests.

Each run goes through the detector and the governor in mode ``Recover``, with a budget of 512 MiB
in 24 hours. ``sen_mib_per_h`` is the Theil-Sen slope after the first hour, over hourly medians.
Writes ``aging-traces.json``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.result import publish
from plimsoll_api.admin import Load
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_api.trace import Host, Sample
from plimsoll_sidecar.replay import ReplayLine, Summary, replay_samples

FOLDER = "proccesseData"  # as its authors spell it
MODELS = ("gpt-neo-125m", "opt-125m", "pythia-160m")
RATES_S = (1, 5, 10)
MIB = 1 << 20
HOUR_S = 3600.0
INTERVAL_S = 60.0
POLICY = MemoryPolicy(host=MemoryBudget(512 * MIB, 24 * HOUR_S), warmup_s=300.0)


def samples(file: Path, every_s: int) -> Iterator[Sample]:
    """Read a recorded run: used memory in bytes, and a request every ``every_s`` seconds.

    Raises SystemExit for a file that is absent or has other columns.
    """
    try:
        with file.open(newline="") as lines:
            began: datetime.datetime | None = None
            last = -1.0
            for row in csv.DictReader(lines):
                at = datetime.datetime.fromisoformat(row["currentTime"])
                began = began or at
                t = (at - began).total_seconds()
                if t <= last:
                    continue
                last = t
                host = Host(rss_anon=int(row["usedMemory"]), processes=1)
                yield Sample(t=t, epoch=1, host=host, load=Load(requests_total=int(t / every_s)))
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(f"{file}: not a run of the data set: {error!r}") from None


def sen_bytes_per_h(run: list[Sample]) -> float | None:
    """Return the Theil-Sen slope of hourly medians after the first hour, in bytes an hour."""
    hours: dict[int, list[int]] = {}
    for sample in run:
        if sample.host.rss_anon is not None:
            hours.setdefault(int(sample.t / HOUR_S), []).append(sample.host.rss_anon)
    points = [(hour, statistics.median(sizes)) for hour, sizes in hours.items() if hour]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2)]
    return statistics.median(slopes) if slopes else None


def examine(name: str, run: list[Sample]) -> dict[str, Any]:
    """Return what the detector said about ``run``, with its times in hours.

    ``slow_leak_h`` is when a slow leak was first reported, None if it never was.
    """
    told: list[ReplayLine] = []
    summary = Summary()
    for line in replay_samples(run, POLICY, Supervision(mode=Mode.RECOVER), INTERVAL_S, name):
        if isinstance(line, Summary):
            summary = line
        else:
            told.append(line)
    slope = sen_bytes_per_h(run)
    return {
        "run": name,
        "hours": round(run[-1].t / HOUR_S, 1),
        "sen_mib_per_h": None if slope is None else round(slope / MIB, 2),
        "incidents": summary.incidents,
        "confirmed": summary.confirmed,
        "slow_leak_h": min(
            (round(line.t / HOUR_S, 1) for line in told if line.event == "slow-leak"), default=None
        ),
        "restarts": sum(line.action not in (None, Action.TRIM) for line in told),
        "events": [
            {
                "event": line.action or line.event,
                "at_h": round(line.t / HOUR_S, 2),
                "consumed_ratio": line.consumed_ratio,
                "mib_per_h": None if line.bytes_per_s is None
                else round(line.bytes_per_s * HOUR_S / MIB, 1),
            }
            for line in told[:50]
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, metavar="DIR", help="a copy of the repository")
    folder: Path = parser.parse_args().data / FOLDER
    rows = [
        examine(
            f"{model}, {rate_s} s",
            list(samples(folder / f"monitoring{model}_{rate_s}s.csv", rate_s)),
        )
        for model in MODELS
        for rate_s in RATES_S
    ]
    publish(
        "aging-traces",
        {
            "runs_count": len(rows),
            "recorded_hours": round(sum(row["hours"] for row in rows), 1),
            "confirmed_runs_count": sum(row["confirmed"] > 0 for row in rows),
            "slow_leaks_count": sum(row["slow_leak_h"] is not None for row in rows),
            "restarts_count": sum(row["restarts"] for row in rows),
        },
        rows,
    )


if __name__ == "__main__":
    main()
