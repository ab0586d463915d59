"""What the supervisor finds in the recordings of real engines, and what other rules would do.

    python -m bench.detection_real               # the seen part: detection-real-seen.json
    python -m bench.detection_real --held-out --since 2026-11-24    # the other part, once
    python -m bench.detection_real --alone       # without the other rules; nothing is written
    python -m bench.detection_real --kept        # the other rules' verdicts as published before

Each recording in ``leaklab/recordings`` goes through the code of ``plimsoll replay`` in mode
``Recover``. A leak is found when an incident of its kind is confirmed after it began. Any other
confirmation is false, and so is a restart for it.

The other rules are those of ``baselines.py``. They see host memory and device memory of each of the
engine's lives, and their limit is the memory of the machine. Each runs twice: with the parameters
that are best on the development split of the leak lab, whose runs last for hours, and as
``NAME_seen`` with those that are best on the seen recordings.

``confirm_p50_s`` is of the leaks whose mean rate spends the budget within ten minutes. Figures that
begin with ``new_`` are of the recordings made since the day of ``--since`` alone: the verdicts on
the others were known when the detector was last changed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.baselines import BASELINES
from bench.detection import tune
from bench.detection_real_rules import blank, curves, ruled
from bench.detection_score import Verdict, f1, figures
from bench.result import RESULTS, publish
from leaklab.recording import verdicts
from leaklab.recording.published import Recording, recordings
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import Mode
from plimsoll_cli.figures import percentile
from plimsoll_sidecar.replay import ReplayLine, replay

SPENT_S = 600.0
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
    verdict = blank(recording)
    verdict.delay_s, verdict.false = told.confirm_s, len(told.wrong)
    verdict.false_stalls = told.wrong.count(IncidentKind.STALL.value)
    verdict.actions = verdicts.false_actions(labels, lines)
    if leak is not None and told.confirm_s is not None:
        verdict.segment_right = told.segment == leak.segment
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


def kept(recording: Recording, published: Mapping[str, Any]) -> dict[str, Verdict]:
    """What the rules made of a recording by the ``samples`` of an earlier result.

    KeyError for a recording that is not in it.
    """
    rows = {row["case"]: row["others"] for row in published["recordings"]}
    found = {}
    for name in published["baselines"]:
        verdict, was = blank(recording), rows[recording.name].get(name, {})
        verdict.delay_s, verdict.false = was.get("delay_s"), was.get("false", 0)
        verdict.actions = verdict.false
        found[name] = verdict
    return found


def summary(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """The figures of the result."""
    leaks = [row for row in rows if row.verdict.leak]
    fast = [row for row in leaks if row.spent_s is not None and row.spent_s <= SPENT_S]
    told = figures([row.verdict for row in rows])
    for name, some in (("confirm", fast), ("confirm_every", leaks)):
        delays = [row.verdict.delay_s for row in some if row.verdict.delay_s is not None]
        for share, key in ((0.5, "p50"), (0.95, "p95")):
            told[f"{name}_{key}_s"] = percentile(delays, share)
        told[f"{name}_leaks_count"] = len(some)
        told[f"{name}_found_count"] = len(delays)
    told["false_stalls_count"] = sum(row.verdict.false_stalls for row in rows)
    told["recordings_count"] = len(rows)
    told["healthy_recordings_count"] = len(rows) - len(leaks)
    told["recorded_hours"] = round(sum(row.verdict.hours for row in rows), 2)
    for name in rows[0].others if rows else ():
        told |= figures([row.others[name] for row in rows], f"{name}_")
    return told


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
    parser.add_argument("--held-out", action="store_true", help="the part that is run once")
    parser.add_argument("--since", metavar="DAY", help="the first day (UTC) of new recordings")
    parser.add_argument("--alone", action="store_true", help="without the other rules")
    parser.add_argument("--kept", action="store_true", help="the other rules as published")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    options = parser.parse_args()
    every = list(recordings())
    chosen = [one for one in every if one.seen is not options.held_out]
    if not chosen:
        raise SystemExit("leaklab/recordings/runs.json names no recording of this part")
    choices: dict[str, dict[str, int]] = {}
    result = "detection-real" if options.held_out else "detection-real-seen"
    published = json.loads((RESULTS / f"{result}.json").read_bytes())["samples"]
    if not options.alone and not options.kept:
        choices[""] = tune(False, options.jobs)
        choices["_seen"] = tuned([one for one in every if one.seen])
    rows = []
    for recording in chosen:
        row = judged(recording)
        others = kept(recording, published) if options.kept else compared(recording, choices)
        row.others = others
        rows.append(row)
        print(row.verdict, row.segment, row.wrong, row.suspected, flush=True)
    found = summary(rows)
    if options.since:
        new = [replace(row, others={}) for row in rows if row.date >= options.since]
        found |= {f"new_{key}": value for key, value in summary(new).items()}
    if options.alone:
        for key, value in found.items():
            print(f"{key:45} {value}")
        return
    publish(
        result,
        found,
        {
            "baselines": published["baselines"]
            if options.kept
            else {
                f"{name}{ending}": repr(BASELINES[name].choices[number])
                for ending, choice in choices.items()
                for name, number in choice.items()
            },
            "recordings": [told(row) for row in rows],
        },
    )


if __name__ == "__main__":
    main()
