"""How much earlier would leaks be confirmed if less sufficed, and what would that cost?

    python -m bench.trade_off              # the leaks and healthy runs of the test split
    python -m bench.trade_off --recordings # the recordings of real engines that may be looked at
    python -m bench.trade_off --quick      # a smoke test of a minute, nothing is written

On generated runs, only ``Thresholds.odds`` is moved: all odds that suffice rise or fall by the same
factor. The runs are those of ``bench/detection.py``, so run that first: once judged here, a split
is no blind one any more. Writes ``detection-trade-off.json``.

On recordings, where leaks are fast, the time decides for which a growth must have lasted
(``MIN_GROWTH_DURATION_S``). It is moved as well, alone. ``confirm_p50_s`` is as in
``bench/detection_real.py``, and each row names the healthy recordings with a false event. Writes
``detection-trade-off-real.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.constants import Constant, constants_of, moved
from bench.detection import NICE, ours
from bench.detection_real import Row, judged, summary
from bench.detection_run import Run
from bench.detection_score import Verdict, figures
from bench.result import publish
from leaklab.cases import Case, leaks, named, negatives
from leaklab.recording.published import Recording, recordings
from leaklab.splits import Split
from plimsoll_sidecar.detect import growth, thresholds

FACTORS = {"1/1000": 1e-3, "1/100": 1e-2, "1/30": 1 / 30, "1/10": 0.1, "1/3": 1 / 3, "1": 1.0}
"""By which the odds that suffice are multiplied."""
ODDS = next(one for one in constants_of(thresholds) if one.label == "THRESHOLDS.odds")
LASTED = next(one for one in constants_of(growth) if one.label == "MIN_GROWTH_DURATION_S")
ODDS_FACTORS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
LASTED_S = (30.0, 45.0, 60.0, 80.0, LASTED.value, 120.0, 150.0, 180.0, 210.0)
"""How long a growth must have lasted."""
SHOWN = (
    "precision_ratio",
    "recall_ratio",
    "false_events_count",
    "false_actions_count",
    "consumed_at_confirm_p50_ratio",
    "consumed_at_confirm_p95_ratio",
)

SHOWN_OF_RECORDINGS = (
    "precision_ratio",
    "recall_ratio",
    "false_events_count",
    "false_actions_count",
    "confirm_p50_s",
    "confirm_every_p50_s",
)

_cases: list[Case] = []


def ran(task: tuple[float, int]) -> Verdict:
    """The verdict on one run, with all odds that suffice moved by a factor."""
    factor, number = task
    with moved(ODDS, ODDS.value * factor):
        return ours(Run(_cases[number])).verdict


def replayed(task: tuple[Constant, float, Recording]) -> Row:
    """What is made of one recording with a constant moved to a value."""
    constant, value, recording = task
    with moved(constant, value):
        return judged(recording)


def judge_recordings(chosen: Sequence[Recording], jobs: int) -> list[dict[str, Any]]:
    """The figures of the recordings, with each constant moved to each value."""
    told = []
    settings = [("odds_that_suffice_ratio", ODDS, ODDS.value * one, one) for one in ODDS_FACTORS]
    settings += [("lasted_s", LASTED, one, one) for one in LASTED_S]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), os.nice, (NICE,)) as pool:
        for name, constant, value, moved_to in settings:
            tasks = [(constant, value, one) for one in chosen]
            rows = list(pool.map(replayed, tasks, chunksize=4))
            row: dict[str, Any] = {name: round(moved_to, 2)} | summary(rows)
            row["wrong"] = [
                f"{one.name}: {its.mechanism}"
                for one, its in zip(chosen, rows, strict=True)
                if its.verdict.false
            ]
            print({key: row[key] for key in (name, *SHOWN_OF_RECORDINGS)}, flush=True)
            told.append(row)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few cases, nothing is written")
    parser.add_argument("--recordings", action="store_true", help="real engines")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    options = parser.parse_args()
    if options.recordings:
        seen = [one for one in recordings() if one.seen]
        rows = judge_recordings(seen[:: 40 if options.quick else 1], options.jobs)
        unmoved = next(row for row in rows if row.get("odds_that_suffice_ratio") == 1.0)
        if not options.quick:
            publish(
                "detection-trade-off-real",
                {key: unmoved[key] for key in (*SHOWN_OF_RECORDINGS, "recordings_count")},
                rows,
            )
        return
    # Series are made of functions without a name: a case travels by its number.
    _cases.extend([*leaks(Split.TEST, 1), *negatives(Split.TEST, 6), *named(Split.TEST)])
    numbers = range(0, len(_cases), 40 if options.quick else 1)
    told: dict[str, float | int | None] = {}
    rows = []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, context, os.nice, (NICE,)) as pool:
        for name, factor in FACTORS.items():
            verdicts = list(pool.map(ran, [(factor, number) for number in numbers], chunksize=4))
            row = figures(verdicts)
            print(name, {key: row[key] for key in SHOWN}, flush=True)
            rows.append({"odds_that_suffice": name} | row)
            if factor == min(FACTORS.values()):
                told = {f"earliest_{key}": row[key] for key in SHOWN}
    if not options.quick:
        publish("detection-trade-off", told | {key: row[key] for key in SHOWN}, rows)


if __name__ == "__main__":
    main()
