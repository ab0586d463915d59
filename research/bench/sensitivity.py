"""What does each constant of the detector change? Each is moved by 30 %, alone.

    python -m bench.sensitivity                        # all modules of the detector
    python -m bench.sensitivity --modules plimsoll_sidecar.detect.growth --jobs 16
    python -m bench.sensitivity --quick                # a smoke test, nothing is written

A fixed part of the leak lab's runs is judged with the constants as they are, and again for each
constant and direction. The part has as many families as ``--share`` allows, then more runs of each.
A run in which no function that reads a constant was called stays as it was, and is not repeated.
Writes ``sensitivity.json``. ``--minutes`` and Ctrl-C end the measurement early: what was run is
published, and what was not is named.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import constants
from bench.constants import Constant
from bench.constants_source import Code, code_of, modules_of, unnamed
from bench.detection import NICE, cases_of, ours
from bench.detection_run import Run
from bench.result import publish
from bench.sensitivity_runs import Outcome, Score, score, subset
from leaklab.cases import Case
from leaklab.splits import Split

SPLITS = (Split.DEVELOPMENT, Split.SEEN)
FACTORS = (1.3, 0.7)
SHARE = 0.035
"""Of the samples of all runs: a variant takes 40 s of a processor at most. A share of .11 has one
run of each family, and takes three times as long."""
DEFAULT = ("plimsoll_sidecar.detect",)


@dataclass
class Moved:
    """One constant in one direction, and the runs that are to be judged with it."""

    constant: Constant
    value: float | int
    runs: list[int]
    changed: int = 0
    score: Score | None = None
    failed: str | None = None
    cpu_s: float = 0.0


@dataclass
class Work:
    """What the processes were forked with: series have no name that could travel."""

    cases: list[Case] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)


_work = Work()


# ---- in a process of its own


def _judged(case: Case) -> Outcome:
    run = Run(case)
    try:
        told = ours(run)
    except (ArithmeticError, LookupError, ValueError, TypeError, AssertionError) as error:
        # A moved constant may be none that the code can take.
        return Outcome(run.verdict(), failed=repr(error)[:200])
    stated = tuple((one.opened, one.last, one.end) for one in told.stated)
    return Outcome(told.verdict, tuple(told.times), stated)


def _unmoved(number: int) -> tuple[Outcome, frozenset[Code]]:
    """The outcome of a run, and the functions that were called in it."""
    profile = cProfile.Profile(builtins=False)
    outcome = profile.runcall(_judged, _work.cases[number])
    called = (one.code for one in profile.getstats())
    return outcome, frozenset(code_of(code) for code in called if not isinstance(code, str))


def _with_moved(task: tuple[int, int]) -> tuple[int, int, Outcome, float]:
    which, number = task
    moved, before = _work.moved[which], time.process_time()
    with constants.moved(moved.constant, moved.value):
        outcome = _judged(_work.cases[number])
    return which, number, outcome, time.process_time() - before


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), os.nice, (NICE,))


# ---- all of it


def all_moved(
    found: Sequence[Constant], called: Sequence[frozenset[Code]]
) -> tuple[list[Moved], dict[str, str]]:
    """What is to be judged, and why the other constants cannot be moved."""
    made, stuck = [], {}
    for constant in found:
        name = f"{constant.module}.{constant.label}"
        why = constants.stuck(constant)
        targets = {constants.target(constant, factor) for factor in FACTORS} - {None}
        if why is not None or not targets:
            stuck[name] = why or f"{constant.value} moved by 30 % is rounded to itself"
            continue
        users = constants.users(constant)
        runs = [number for number, each in enumerate(called) if users & each]
        for factor in FACTORS:
            value = constants.target(constant, factor)
            if value is not None:
                made.append(Moved(constant, value, runs))
    return made, stuck


def judge_moved(unmoved: Sequence[Outcome], jobs: int, until: float) -> list[Moved]:
    """Those that were judged before ``until`` or Ctrl-C, each with its score; it prints each."""
    outcomes: dict[int, dict[int, Outcome]] = defaultdict(dict)
    done = []
    with _pool(jobs) as pool:
        for first in range(0, len(_work.moved), jobs):
            if time.monotonic() > until:
                break
            chunk = range(first, min(first + jobs, len(_work.moved)))
            tasks = [(which, number) for which in chunk for number in _work.moved[which].runs]
            try:
                for which, number, outcome, cpu_s in pool.map(_with_moved, tasks, chunksize=2):
                    outcomes[which][number] = outcome
                    _work.moved[which].cpu_s += cpu_s
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            for which in chunk:
                done.append(_scored(_work.moved[which], unmoved, outcomes.pop(which, {})))
    return done


def _scored(moved: Moved, unmoved: Sequence[Outcome], again: dict[int, Outcome]) -> Moved:
    moved.failed = next((one.failed for one in again.values() if one.failed), None)
    moved.changed = sum(outcome != unmoved[number] for number, outcome in again.items())
    moved.score = score([again.get(number, one) for number, one in enumerate(unmoved)])
    print(
        f"{moved.constant.module.rpartition('.')[2]}.{moved.constant.label}"
        f" {moved.constant.value} -> {moved.value}: {moved.changed} of {len(moved.runs)} changed,"
        f" {moved.failed or moved.score}, {moved.cpu_s:.0f} s",
        flush=True,
    )
    return moved


def row(moved: Moved) -> dict[str, Any]:
    """One constant in one direction, as the result has it."""
    assert moved.score is not None
    return {
        "module": moved.constant.module,
        "constant": moved.constant.label,
        "value": moved.constant.value,
        "moved_to": moved.value,
        "runs_judged": len(moved.runs),
        "runs_changed": moved.changed,
        "failed": moved.failed,
        "cpu_s": round(moved.cpu_s, 1),
        **({} if moved.failed else asdict(moved.score)),
    }


def without_effect(rows: Sequence[dict[str, Any]], later: Sequence[Moved] = ()) -> list[str]:
    """The constants that changed no run in any direction; not those that ``later`` still has."""
    half = {f"{one.constant.module}.{one.constant.label}" for one in later}
    effects: dict[str, int] = defaultdict(int)
    for one in rows:
        name = f"{one['module']}.{one['constant']}"
        effects[name] += one["runs_changed"] + (one["failed"] is not None)
    return [name for name, changed in effects.items() if not changed and name not in half]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", nargs="+", default=DEFAULT, help="modules or packages")
    parser.add_argument("--share", type=float, default=SHARE, help="of all samples, above 0 to 1")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing new after that")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    parser.add_argument("--quick", action="store_true", help="few runs, nothing is written")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    modules = modules_of(options.modules)
    found = [one for module in modules for one in constants.constants_of(module)]
    every = [
        case
        for split in SPLITS
        for case in cases_of(split, False)
        if not case.family.startswith("trigger ")
    ]
    _work.cases = subset(every, 0.002 if options.quick else options.share)
    with _pool(options.jobs) as pool:
        judged = list(pool.map(_unmoved, range(len(_work.cases))))
    unmoved = [outcome for outcome, _ in judged]
    base = score(unmoved)
    print(len(_work.cases), "runs", base, flush=True)
    _work.moved, stuck = all_moved(found[:3] if options.quick else found, [c for _, c in judged])
    done = judge_moved(unmoved, options.jobs, until)
    if options.quick:
        return
    rows = [row(one) for one in done]
    later = _work.moved[len(done) :]
    publish(
        "sensitivity",
        {
            "constants_count": len({(r["module"], r["constant"]) for r in rows}),
            "constants_without_effect_count": len(without_effect(rows, later)),
            "constants_not_movable_count": len(stuck),
            "constants_not_run_count": len({one.constant for one in later}),
            "runs_count": len(_work.cases),
            "families_count": len({(case.split, case.family) for case in _work.cases}),
            "families_of_all_count": len({(case.split, case.family) for case in every}),
            "false_events_count": base.false_events,
            "missed_leaks_count": base.missed_leaks,
            "false_restarts_count": base.false_restarts,
            "consumed_p50_ratio": base.consumed_p50,
            "false_stalls_count": base.false_stalls,
            "missed_stalls_count": base.missed_stalls,
        },
        {
            "moved": rows,
            "without_effect": without_effect(rows, later),
            "not_movable": stuck,
            "not_run": [
                f"{one.constant.module}.{one.constant.label} to {one.value}" for one in later
            ],
            "unnamed": {
                module.__name__: numbers for module in modules if (numbers := unnamed(module))
            },
        },
    )


if __name__ == "__main__":
    main()
