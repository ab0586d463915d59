"""What the supervisor finds in the recordings of real engines, and what other rules would do.

    python -m bench.detection_real            # what may be looked at: detection-real-seen.json
    python -m bench.detection_real --drawn --beside 3808e1c  # the part drawn by lot, once
    python -m bench.detection_real --alone    # without the other rules; nothing is written
    python -m bench.detection_real --kept     # the other rules with the parameters published before

Each recording in ``research/leaklab/recordings`` goes through the code of ``plimsoll replay`` in
mode ``Recover``. A leak is found when an incident of its kind is confirmed after it began. Any
other confirmation is false, and so is a restart for it.

The other rules are those of ``baselines.py``. They see host memory and device memory of each of the
engine's lives, and their limit is the memory of the machine. Each runs twice: with the parameters
that are best on the development split of the leak lab, whose runs last for hours, and as
``NAME_seen`` with those that are best on the seen recordings.

``confirm_p50_s`` is of the leaks whose mean rate spends the budget within ten minutes. Shares have
Wilson's interval of 95 %, and medians the interval between two order statistics (binomial, 95 %).
``--beside`` replays the recordings with the supervisor of an earlier commit as well; its figures
begin with ``at_`` and the commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.baselines import BASELINES
from bench.detection import tune
from bench.detection_real_rules import blank, curves, ruled
from bench.detection_score import Verdict, f1, figures
from bench.result import RESULTS, publish
from leaklab.recording import verdicts
from leaklab.recording.published import Recording, recordings
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import Mode
from plimsoll_cli.figures import compute_percentile
from plimsoll_sidecar.replay import ReplayLine, replay

SPENT_S = 600.0
PACKAGES = ("sidecar", "crds", "cli")
"""What a replay by an earlier release needs of its tree."""
Choices = Mapping[str, Mapping[str, int]]
"""The end of a rule's name -> the rule -> the number of its choice of parameters."""


@dataclass
class Row:
    """One recording: what was confirmed and suspected, and each rule's verdict."""

    verdict: Verdict
    engine: str
    mechanism: str
    spent_s: float | None
    segment: str | None
    wrong: tuple[str, ...]
    suspected: tuple[str, ...]
    date: str
    others: dict[str, Verdict] = field(default_factory=dict)


def judged(recording: Recording) -> Row:
    """What the supervisor makes of the recording."""
    lines = [line for line in replay(recording.trace, Mode.RECOVER) if isinstance(line, ReplayLine)]
    labels, about = recording.labels, recording.about
    told = verdicts.judge(labels, lines)
    leak = next(iter(labels.leaks), None)
    verdict = _verdict(recording, lines)
    return Row(
        verdict,
        f"{about['engine']} {about['version']}",
        about["mechanism"],
        None if leak is None else about["budget_bytes"] / leak.rate_bytes_per_s,
        told.segment,
        told.wrong,
        told.suspected,
        about["date"],
    )


def _verdict(recording: Recording, lines: Sequence[ReplayLine]) -> Verdict:
    """The lines of a replay, compared with the labels."""
    labels, verdict = recording.labels, blank(recording)
    told = verdicts.judge(labels, lines)
    verdict.delay_s, verdict.false = told.confirm_s, len(told.wrong)
    verdict.false_stalls = told.wrong.count(IncidentKind.STALL.value)
    verdict.actions = verdicts.false_actions(labels, lines)
    if labels.leaks and told.confirm_s is not None:
        verdict.segment_right = told.segment == labels.leaks[0].segment
    return verdict


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The packages of a commit in a temporary folder. CalledProcessError without that commit."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", commit, *PACKAGES]
        packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        yield Path(folder)


def judged_by(tree: Path, recording: Recording) -> Verdict:
    """What the supervisor of another tree makes of the recording, in a process of its own.

    CalledProcessError if it cannot read the trace.
    """
    paths = os.pathsep.join(str(tree / package) for package in PACKAGES)
    told = subprocess.run(
        [sys.executable, "-m", "plimsoll_sidecar.replay", recording.trace, "--mode", "Recover"],
        env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True,
    ).stdout  # fmt: skip
    rows = [msgspec.json.decode(line) for line in told.splitlines()]
    lines = [msgspec.convert(row, ReplayLine) for row in rows if row["event"] != "summary"]
    return _verdict(recording, lines)


def tuned(chosen: Sequence[Recording]) -> dict[str, int]:
    """The choice of each rule with the best F1 on these recordings; the first of equals."""
    seen = [(recording, curves(recording)) for recording in chosen]
    best: dict[str, int] = {}
    for name, baseline in BASELINES.items():
        scores = [
            f1([ruled(recording, its, baseline, choice) for recording, its in seen])
            for choice in baseline.choices
        ]
        best[name] = scores.index(max(scores))
    return best


def compared(recording: Recording, choices: Choices) -> dict[str, Verdict]:
    """What the rules make of a recording, by name and by what their parameters were tuned on."""
    seen = curves(recording)
    return {
        f"{name}{ending}": ruled(recording, seen, BASELINES[name], BASELINES[name].choices[number])
        for ending, choice in choices.items()
        for name, number in choice.items()
    }


def kept(published: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The choices of an earlier result. KeyError if its baselines or their choices are others."""
    choices: dict[str, dict[str, int]] = {"": {}, "_seen": {}}
    for key, chosen in published["baselines"].items():
        name = key.removesuffix("_seen")
        number = [repr(choice) for choice in BASELINES[name].choices].index(chosen)
        choices[key.removeprefix(name)][name] = number
    return choices


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The order statistics between which the median lies with 95 %; None for too few values."""
    count, tail = len(values), 0.0
    for below in range(count // 2):
        tail += math.comb(count, below) / 2**count
        if tail > 0.025:
            return (sorted(values)[below - 1], sorted(values)[-below]) if below else None
    return None


def summary(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """The figures of the result."""
    leaks = [row for row in rows if row.verdict.leak]
    fast = [row for row in leaks if row.spent_s is not None and row.spent_s <= SPENT_S]
    told = figures([row.verdict for row in rows])
    for name, some in (("confirm", fast), ("confirm_every", leaks)):
        told |= _delays(name, [row.verdict for row in some])
    told["false_stalls_count"] = sum(row.verdict.false_stalls for row in rows)
    told["recordings_count"] = len(rows)
    told["healthy_recordings_count"] = len(rows) - len(leaks)
    told["recorded_hours"] = round(sum(row.verdict.hours for row in rows), 2)
    for name in rows[0].others if rows else ():
        told |= figures([row.others[name] for row in rows], f"{name}_")
        told |= _delays(f"{name}_confirm", [row.others[name] for row in fast])
    return told


def _delays(name: str, leaks: Sequence[Verdict]) -> dict[str, float | int | None]:
    """How long the confirmations of some leaks took."""
    delays = [verdict.delay_s for verdict in leaks if verdict.delay_s is not None]
    low, high = median_interval(delays) or (None, None)
    return {
        f"{name}_p50_s": compute_percentile(delays, 0.5),
        f"{name}_p50_low_s": low,
        f"{name}_p50_high_s": high,
        f"{name}_p95_s": compute_percentile(delays, 0.95),
        f"{name}_leaks_count": len(leaks),
        f"{name}_found_count": len(delays),
    }


def told(row: Row) -> dict[str, Any]:
    """One recording as the result has it: of the other rules only what they did."""
    whole = asdict(row.verdict) | {
        "engine": row.engine,
        "mechanism": row.mechanism,
        "spent_s": None if row.spent_s is None else round(row.spent_s),
        "confirmed": row.segment,
        "wrong": row.wrong,
        "suspected": row.suspected,
    }
    others = {
        name: {"delay_s": verdict.delay_s, "false": verdict.false}
        for name, verdict in row.others.items()
        if verdict.delay_s is not None or verdict.false
    }
    return {key: value for key, value in whole.items() if value is not None} | {"others": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drawn", action="store_true", help="the part drawn by lot, once")
    parser.add_argument("--beside", metavar="COMMIT", help="the supervisor of that commit as well")
    parser.add_argument("--alone", action="store_true", help="without the other rules")
    parser.add_argument("--kept", action="store_true", help="the parameters published before")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    options = parser.parse_args()
    every = list(recordings())
    chosen = [one for one in every if one.seen is not options.drawn]
    if not chosen:
        raise SystemExit("runs.json names no recording of this part")
    choices: dict[str, dict[str, int]] = {}
    if options.kept:
        seen = json.loads((RESULTS / "detection-real-seen.json").read_bytes())
        choices = kept(seen["samples"])
    elif not options.alone:
        choices = {"": tune(False, options.jobs)}
        choices["_seen"] = tuned([one for one in every if one.seen])
    rows = []
    for recording in chosen:
        row = judged(recording)
        row.others = compared(recording, choices)
        rows.append(row)
        print(row.verdict, row.segment, row.wrong, row.suspected, flush=True)
    if options.beside:
        with checked_out(options.beside) as tree:
            for row, recording in zip(rows, chosen, strict=True):
                row.others[f"at_{options.beside}"] = judged_by(tree, recording)
    found = summary(rows)
    if options.alone:
        for key, value in found.items():
            print(f"{key:45} {value}")
        return
    publish(
        "detection-real" if options.drawn else "detection-real-seen",
        found,
        {
            "baselines": {
                f"{name}{ending}": repr(BASELINES[name].choices[number])
                for ending, choice in choices.items()
                for name, number in choice.items()
            },
            "recordings": [told(row) for row in rows],
        },
    )


if __name__ == "__main__":
    main()
