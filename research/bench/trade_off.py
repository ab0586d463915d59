"""How much earlier would leaks be confirmed if fewer odds sufficed, and what would that cost?

    python -m bench.trade_off            # the leaks and healthy runs of the test split
    python -m bench.trade_off --quick    # a smoke test of a minute, nothing is written

Only ``Thresholds.odds`` is moved: all odds that suffice rise or fall by the same factor. What has
taken almost the whole budget, or is straight for an hour, needs no odds. The runs are those of
``bench/detection.py``, so run that first: once judged here, a split is no blind one any more.
Writes ``detection-trade-off.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from bench.constants import constants_of, moved
from bench.detection import NICE, ours
from bench.detection_run import Run
from bench.detection_score import Verdict, figures
from bench.result import publish
from leaklab.cases import Case, leaks, named, negatives
from leaklab.splits import Split
from plimsoll_sidecar.detect import thresholds

FACTORS = {"1/1000": 1e-3, "1/100": 1e-2, "1/30": 1 / 30, "1/10": 0.1, "1/3": 1 / 3, "1": 1.0}
"""By which the odds that suffice are multiplied."""
ODDS = next(one for one in constants_of(thresholds) if one.label == "THRESHOLDS.odds")
SHOWN = (
    "precision_ratio",
    "recall_ratio",
    "false_events_count",
    "false_actions_count",
    "consumed_at_confirm_p50_ratio",
    "consumed_at_confirm_p95_ratio",
)

_cases: list[Case] = []


def judged(task: tuple[float, int]) -> Verdict:
    """The verdict on one run, with all odds that suffice moved by a factor."""
    factor, number = task
    with moved(ODDS, ODDS.value * factor):
        return ours(Run(_cases[number])).verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few cases, nothing is written")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    options = parser.parse_args()
    # Series are made of functions without a name: a case travels by its number.
    _cases.extend([*leaks(Split.TEST, 1), *negatives(Split.TEST, 6), *named(Split.TEST)])
    numbers = range(0, len(_cases), 40 if options.quick else 1)
    told: dict[str, float | int | None] = {}
    rows = []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, context, os.nice, (NICE,)) as pool:
        for name, factor in FACTORS.items():
            verdicts = list(pool.map(judged, [(factor, number) for number in numbers], chunksize=4))
            row = figures(verdicts)
            print(name, {key: row[key] for key in SHOWN}, flush=True)
            rows.append({"odds_that_suffice": name} | row)
            if factor == min(FACTORS.values()):
                told = {f"earliest_{key}": row[key] for key in SHOWN}
    if not options.quick:
        publish("detection-trade-off", told | {key: row[key] for key in SHOWN}, rows)


if __name__ == "__main__":
    main()
