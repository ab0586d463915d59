"""How does the detector do on the test splits that have been seen? None of them may get worse.

    python -m bench.earlier_splits            # half an hour on two cores
    python -m bench.earlier_splits --quick    # a smoke test of a minute, nothing is written

The runs are those of ``bench/detection.py --split seen``, without the other rules. The first eight
splits are one edition of the leak lab, and count together. Writes ``detection-seen.json``: the
figures of all runs together, and under ``samples`` those of each split.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from bench.detection import Job, examine_all
from bench.detection_score import Verdict, figures
from bench.result import publish
from leaklab import splits
from leaklab.cases import Case, leaks, negatives, stalls
from leaklab.editions import Watched
from leaklab.splits import EDITIONS, Split

EARLIEST, *LATER = EDITIONS[Split.SEEN]
SPLITS = {
    edition.name: name
    for edition, name in zip(EDITIONS[Split.SEEN], ("1 to 8", "9", "10"), strict=True)
}


def split_of(case: Case) -> str:
    """The number of the test split that a leak or a healthy run was written for."""
    if case.starts is None:
        build = splits.FAMILIES[Split.SEEN][case.family]
        return SPLITS[build.edition.name if isinstance(build, Watched) else EARLIEST.name]
    mechanism = case.family.removeprefix("leak ")
    of = (edition for edition in LATER if any(m.name == mechanism for m in edition.mechanisms))
    return SPLITS[next(of, EARLIEST).name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few cases, nothing is written")
    parser.add_argument("--jobs", type=int, default=2, choices=range(1, 65), metavar="1..64")
    options = parser.parse_args()
    growth = [*leaks(Split.SEEN, 1), *negatives(Split.SEEN, 6)]
    hangs = stalls(Split.SEEN)
    if options.quick:
        growth, hangs = growth[::150], hangs[:1]
    results = examine_all(Job([*growth, *hangs], alone=True), options.jobs)
    verdicts = [told.verdict for told, _ in results]
    judged, hung = verdicts[: len(growth)], verdicts[len(growth) :]
    by_split: dict[str, list[Verdict]] = defaultdict(list)
    for case, verdict in zip(growth, judged, strict=True):
        by_split[split_of(case)].append(verdict)
    whole: dict[str, float | int | None] = figures(judged) | {
        "leaks_count": sum(v.leak for v in judged),
        "stalls_missed_count": sum(v.delay_s is None for v in hung),
        "stalls_false_count": sum(v.false_stalls for v in verdicts),
    }
    rows: list[dict[str, Any]] = [
        {"split": name, "leaks_count": sum(v.leak for v in of), **figures(of)}
        for name, of in by_split.items()
    ]
    for row in rows:
        print(row, flush=True)
    print(whole)
    if not options.quick:
        publish("detection-seen", whole, rows)


if __name__ == "__main__":
    main()
