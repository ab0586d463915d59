"""Does the supervisor find leaks, and leave the healthy alone? And how do other rules do?

    python -m bench.detection                       # test split; baselines tuned on development
    python -m bench.detection --split development   # while the detector is being improved
    python -m bench.detection --split seen          # the earlier test splits, seen since
    python -m bench.detection --sample 120          # so many runs of all splits, drawn with a seed
    python -m bench.detection --quick               # a smoke test of a minute

Each labelled run of ``leaklab`` goes through the sidecar's detector and governor in
``Recover``, by the code of ``plimsoll replay``, and through the rules of ``baselines.py``. A leak
is found when an incident of its kind is confirmed after it began; a confirmation of anything else
is false. Time is virtual. The figures are those of the test split only, but for the calibration:
that is of all splits together (``calibration.py``). Those of the earlier test splits are published
beside them as ``detection-seen.json``. A sample of all splits takes minutes instead of hours, and
is judged without the other rules: ``detection-sample.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import calibration, precog
from bench.baselines import BASELINES, alarms
from bench.calibration import Stated
from bench.detection_figures import all_stated, report, summary
from bench.detection_run import Run
from bench.detection_score import Verdict, f1, figures
from bench.earlier_splits import seen_figures
from bench.result import publish
from leaklab import recorded
from leaklab.bursts import bursts
from leaklab.cases import Case, leaks, named, negatives, saturation, stalls
from leaklab.splits import Split
from leaklab.triggered import triggers
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import Action, Mode, Stall, Supervision
from plimsoll_sidecar.replay import ReplayLine, replay_samples

STALL_TIMEOUT_S = 30.0
SEED = 33
"""It draws the sample."""
NICE = 5
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "img"


@dataclass
class Told:
    """What the supervisor made of one run: when it confirmed, and what it stated."""

    verdict: Verdict
    times: list[float] = field(default_factory=list)
    stated: list[Stated] = field(default_factory=list)


def ours(run: Run) -> Told:
    """What detector and governor make of the run."""
    case, verdict = run.case, run.verdict()
    supervision = Supervision(mode=Mode.RECOVER, stall=Stall(timeout_s=STALL_TIMEOUT_S))
    lines = replay_samples(run.samples, case.policy, supervision, case.series.interval, case.name)
    times, listener = [], calibration.Listener(case)
    for line in lines:
        if not isinstance(line, ReplayLine):
            break
        listener.hear(line)
        due = case.starts is not None and line.t >= case.starts
        if line.event == "confirmed":
            times.append(line.t)
            if not (due and line.kind == case.kind):
                verdict.false += 1
                verdict.false_stalls += line.kind == IncidentKind.STALL
            elif verdict.delay_s is None:
                run.found(verdict, line.t)
                if case.segment is not None:
                    verdict.segment_right = line.segment == case.segment
                if case.trigger is None:
                    break
                verdict.trigger_at_confirm = line.trigger == case.trigger
                verdict.trigger_right = False
        elif line.event == "remediation" and line.action != Action.TRIM.value:
            verdict.actions += not due
            if due and case.trigger is not None:
                verdict.trigger_right = line.trigger == case.trigger
                break
    return Told(verdict, times, list(listener.stated.values()))


def theirs(
    run: Run, chosen: dict[str, int] | None
) -> Iterator[tuple[str, int, Verdict, list[float]]]:
    """Each baseline with the choice of its parameters, or with each that there is."""
    for name, baseline in BASELINES.items():
        for number, choice in enumerate(baseline.choices):
            if chosen is not None and chosen[name] != number:
                continue
            verdict = run.verdict()
            times = alarms(baseline, run.t, run.sizes, run.limit, choice)
            for t in times:
                if run.case.starts is not None and t >= run.case.starts:
                    run.found(verdict, t)
                    break
                verdict.false += 1
                verdict.actions += 1
            yield name, number, verdict, times[:50]


@dataclass
class Job:
    """The cases to examine; ``tune`` asks the baselines only, with every choice of parameters."""

    cases: list[Case]
    chosen: dict[str, int] | None = None
    tune: bool = False
    alone: bool = False

    def examine(self, number: int) -> tuple[Told, list[Any]]:
        run = Run(self.cases[number])
        mine = Told(run.verdict()) if self.tune else ours(run)
        # A hang is no matter of memory, a trigger none of theirs: the baselines are not asked.
        hang = run.case.kind == "Stall"
        none = self.alone or hang or run.case.trigger
        return mine, [] if none else list(theirs(run, self.chosen))


def cases_of(split: Split, quick: bool) -> list[Case]:
    cases = [*leaks(split, 1), *negatives(split, 1 if quick else 6)]
    if quick:
        return [*cases[::9], *stalls(split)[:1]]
    cases += [*named(split), *recorded.slow(split), *stalls(split), *triggers(split)]
    return [*cases, *bursts(split), saturation()] if split is Split.TEST else cases


def examine_all(job: Job, processes: int) -> list[Any]:
    # Series are made of functions without a name: a case travels by its number, to a process that
    # was forked with all of them.
    global _job
    _job = job
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, os.nice, (NICE,)) as pool:
        return list(pool.map(_examine, range(len(job.cases))))


_job = Job([])


def _examine(number: int) -> Any:
    return _job.examine(number)


def tuned(results: list[Any]) -> dict[str, int]:
    """The number of each baseline's choice with the best F1; the first of equals."""
    by_choice: dict[tuple[str, int], list[Verdict]] = defaultdict(list)
    for _, others in results:
        for name, number, verdict, _ in others:
            by_choice[name, number].append(verdict)
    best: dict[str, int] = {}
    for name, number in by_choice:
        if name not in best or f1(by_choice[name, number]) > f1(by_choice[name, best[name]]):
            best[name] = number
    return best


def tune(quick: bool, jobs: int) -> dict[str, int]:
    """The choice of each baseline on the development split, from which Precog learns as well."""
    development = cases_of(Split.DEVELOPMENT, quick)
    precog.learn(Run(case).series() for case in development if case.starts is None)
    return tuned(examine_all(Job(development, tune=True), jobs))


def sampled(count: int) -> list[Case]:
    """So many runs of growth of all splits."""
    cases = [case for split in Split for case in cases_of(split, False) if case.kind != "Stall"]
    return random.Random(SEED).sample(cases, count)


def by_window(
    cases: Sequence[Case], verdicts: Sequence[Verdict]
) -> list[dict[str, float | int | None]]:
    """The figures of the runs with each window of the budget."""
    of: dict[float, list[Verdict]] = defaultdict(list)
    for case, verdict in zip(cases, verdicts, strict=True):
        of[case.window_s].append(verdict)
    return [
        figures(some)
        | {"window_s": window, "runs_count": len(some), "leaks_count": sum(v.leak for v in some)}
        for window, some in sorted(of.items())
    ]


def publish_sample(count: int, jobs: int) -> None:
    """Judge a sample of all splits without the other rules, and publish it."""
    cases = sampled(count)
    results = examine_all(Job(cases, alone=True), jobs)
    report(results, {})
    verdicts = [told.verdict for told, _ in results]
    healthy = [verdict for verdict in verdicts if not verdict.leak]
    publish(
        "detection-sample",
        figures(verdicts)
        | {
            "runs_count": len(cases),
            "leaks_count": len(cases) - len(healthy),
            "restarted_healthy_runs_count": sum(verdict.actions > 0 for verdict in healthy),
            "healthy_runs_count": len(healthy),
        },
        {"by_window": by_window(cases, verdicts), "runs": [asdict(v) for v in verdicts]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", type=Split, choices=list(Split), default=Split.TEST)
    parser.add_argument("--quick", action="store_true", help="few cases, nothing is written")
    parser.add_argument("--alone", action="store_true", help="without the other rules")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    parser.add_argument("--sample", type=int, metavar="N", help="runs of all splits")
    options = parser.parse_args()
    if options.sample:
        publish_sample(options.sample, options.jobs)
        return
    choice = {} if options.alone else tune(options.quick, options.jobs)
    cases = cases_of(options.split, options.quick)
    results = examine_all(Job(cases, choice, alone=options.alone), options.jobs)
    report(results, choice)
    if options.quick or options.alone or options.split is not Split.TEST:
        return
    others = [*cases_of(Split.SEEN, False), *cases_of(Split.DEVELOPMENT, False)]
    told_of_others = examine_all(Job(others, alone=True), options.jobs)
    stated = all_stated([*results, *told_of_others])
    publish(
        "detection",
        summary(results, choice) | calibration.figures(stated),
        {
            "baselines": {
                name: repr(BASELINES[name].choices[number]) for name, number in choice.items()
            },
            "runs": [asdict(told.verdict) for told, _ in results],
            "calibration": calibration.table(stated),
        },
    )
    # These are the first of a split's cases.
    growth = [*leaks(Split.SEEN, 1), *negatives(Split.SEEN, 6)]
    of_seen = [told.verdict for told, _ in told_of_others[: len(cases_of(Split.SEEN, False))]]
    publish("detection-seen", *seen_figures(growth, of_seen))
    # matplotlib is slow to import, and nothing else needs it.
    from bench import calibration_plot, detection_plot

    calibration_plot.draw(stated, PICTURES)
    detection_plot.draw(cases, results, choice, PICTURES)


if __name__ == "__main__":
    main()
