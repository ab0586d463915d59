"""Which runs the sensitivity is measured on, and what is compared of them. Pure."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.detection_score import Verdict
from leaklab.cases import Case
from plimsoll_cli.figures import compute_percentile


@dataclass(frozen=True)
class Outcome:
    """What came of one run: all that must be equal where a constant has no effect."""

    verdict: Verdict
    times: tuple[float, ...] = ()
    stated: tuple[Any, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class Score:
    """The runs together."""

    false_events: int
    missed_leaks: int
    false_restarts: int
    consumed_p50: float | None
    false_stalls: int
    missed_stalls: int


def subset(cases: Sequence[Case], share: float) -> list[Case]:
    """A fixed part of the cases that holds about ``share`` of their samples.

    Families take turns, leaks, healthy runs and stalls alike, and each brings its next run in every
    round. More share adds runs, and takes none away.
    """
    families: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        families[f"{case.split.value} {case.family}"].append(case)
    strata: dict[str, list[list[Case]]] = defaultdict(list)
    for name in sorted(families, key=lambda name: random.Random(name).random()):
        turn = sorted(families[name], key=lambda case: random.Random(case.name).random())
        strata[turn[0].kind or "healthy"].append(turn)
    # Each beginning of the order has the strata in proportion.
    placed = [
        ((place + 0.5) / len(turns), turn)
        for turns in strata.values()
        for place, turn in enumerate(turns)
    ]
    order = [turn for _, turn in sorted(placed, key=lambda one: one[0])]
    left = share * sum(map(cost, cases))
    chosen: list[Case] = []
    for number in range(max(map(len, order), default=0)):
        for turn in order:
            if number < len(turn) and left > 0:
                chosen.append(turn[number])
                left -= cost(turn[number])
    return chosen


def cost(case: Case) -> float:
    """Samples."""
    return case.series.duration / case.series.interval


def score(outcomes: Sequence[Outcome]) -> Score:
    verdicts = [one.verdict for one in outcomes]
    leaks = [v for v in verdicts if v.leak and not v.family.startswith("stall ")]
    stalls = [v for v in verdicts if v.family.startswith("stall ")]
    consumed = [v.consumed for v in leaks if v.delay_s is not None and v.consumed is not None]
    middle = compute_percentile(consumed, 0.5)
    return Score(
        sum(v.false for v in verdicts),
        sum(v.delay_s is None for v in leaks),
        sum(v.actions for v in verdicts),
        None if middle is None else round(middle, 4),
        sum(v.false_stalls for v in verdicts),
        sum(v.delay_s is None for v in stalls),
    )
