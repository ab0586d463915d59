"""How does the detector do on the test splits that have been seen? None of them may get worse.

The first eight splits are one edition of the leak lab, and count together. Pure: ``detection.py``
judges the runs and publishes the figures as ``detection-seen.json``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.detection_score import Verdict, figures
from leaklab import splits
from leaklab.cases import Case
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


def seen_figures(
    growth: Sequence[Case], verdicts: Sequence[Verdict]
) -> tuple[dict[str, float | int | None], list[dict[str, Any]]]:
    """The figures of all runs together, and those of each split.

    ``verdicts`` are of the runs of ``growth`` first; those on stalls are counted wherever they are.
    """
    judged = verdicts[: len(growth)]
    hung = [verdict for verdict in verdicts if verdict.family.startswith("stall ")]
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
    return whole, rows
