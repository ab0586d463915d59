"""The weights of ``detect/odds.py``, fitted by maximum likelihood to labelled runs.

    python -m bench.odds_fit                # a sixth of the runs of development and seen
    python -m bench.odds_fit --every 1      # all of them

A case of ``leaklab`` is played into the detector. Each suspicion counts once: one half of it is how
it looks when it is raised, and the other half how it looks at each further fortieth of the budget.
So the chances are those of a suspicion, and one that lasts says no more than a short one.

The families are dealt into five parts. What is published is how well the weights of four parts
state the chances of the fifth. The test split is never used.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logsumexp

from bench.detection import cases_of
from bench.result import publish
from leaklab.cases import Case
from leaklab.splits import Split
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.odds import REUSABLE_SEGMENTS, WEIGHTS, Evidence, Weights

STALL_TIMEOUT_S = 30.0
LEAST_LEAKED, MOST = 0.03, 1.05
"""Shares of the budget: what has leaked before a growth is judged, and what is beyond all doubt."""
LEVELS = 40
"""A suspicion is looked at once in each such part of its budget."""
PENALTY = 0.01
MAX_LOG_ODDS = 50.0
"""Bound with which the optimizer meets no infinite number."""
PARTS = 5
NAMES = tuple(field.name for field in fields(Weights))
POSITIVE = {"size", "speed", "fading", "younger", "climb"}
"""Evidence that can only speak in one direction: fitted as exponentials."""
COLUMNS = 9
"""Of a row: six of the evidence, the label, the weight and the case."""
Matrix = np.ndarray
NICE = 5


@dataclass
class Rows:
    """What was seen (one row a look), whether it was a leak, its weight, and whose case it is."""

    seen: Matrix
    leak: Matrix
    weights: Matrix
    case: Matrix

    def take(self, rows: Matrix) -> Rows:
        return Rows(self.seen[rows], self.leak[rows], self.weights[rows], self.case[rows])


def seen(evidence: Evidence) -> tuple[float, ...]:
    """The numbers that the odds depend on."""
    reusable = float(evidence.segment in REUSABLE_SEGMENTS)
    return (
        evidence.size_evidence,
        evidence.speed_evidence,
        evidence.fading,
        evidence.age_evidence,
        max(0.0, evidence.climb),
        reusable,
    )


def against(values: Matrix, x: Matrix) -> Matrix:
    """The log-odds of a leak against each explanation, as ``odds.py`` states them."""
    w = dict(zip(NAMES, values, strict=True))
    size, speed, slowing, younger, climb, reusable = x.T
    common = w["size"] * size + w["speed"] * speed
    alone = np.array([
        w["filling"] + w["fading"] * slowing,
        w["later_work"] + w["younger"] * younger,
        w["load"] - w["climb"] * climb,
        np.where(reusable > 0, w["retained"], MAX_LOG_ODDS),
    ])  # fmt: skip
    return np.asarray(np.clip(alone + common, -MAX_LOG_ODDS, MAX_LOG_ODDS))


def log_odds(values: Matrix, x: Matrix) -> Matrix:
    return np.asarray(-logsumexp(-against(values, x), axis=0))


def fit(rows: Rows) -> Matrix:
    """The weights of the greatest likelihood, near those of today where the data says nothing."""
    positive = np.array([name in POSITIVE for name in NAMES])
    today = np.array([getattr(WEIGHTS, name) for name in NAMES])
    start = np.where(positive, np.log(np.maximum(1e-3, today)), today)

    def plain(free: Matrix) -> Matrix:
        return np.where(positive, np.exp(np.where(positive, free, 0.0)), free)

    def cost(free: Matrix) -> float:
        stated = log_odds(plain(free), rows.seen)
        lost = np.logaddexp(0.0, np.where(rows.leak, -stated, stated))
        return float((rows.weights * lost).sum() + PENALTY * ((free - start) ** 2).sum())

    return plain(minimize(cost, start, method="L-BFGS-B", options={"maxiter": 200}).x)


def calibration(rows: Rows, stated: Matrix) -> tuple[float, list[dict[str, float]]]:
    """The expected calibration error over ten bins, and each bin."""
    chance, count, bins, error = expit(stated), rows.weights, [], 0.0
    for low in np.linspace(0.0, 0.9, 10):
        here = (chance >= low) & (chance < low + 0.1 + (low > 0.85))
        total = float(count[here].sum())
        if total == 0.0:
            continue
        said = float((count * chance)[here].sum()) / total
        true = float((count * rows.leak)[here].sum()) / total
        error += abs(said - true) * total
        bins.append({"weight": round(total, 1), "stated": round(said, 3), "true": round(true, 3)})
    return error / float(count.sum()), bins


class Looked:
    """The looks at one suspicion of a case, which has the ``number``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.looks: dict[int, tuple[tuple[float, ...], bool]] = {}

    def add(self, evidence: Evidence, leak: bool) -> None:
        """Keep the first look, and the last in each level after it."""
        level = int(LEVELS * evidence.share) if self.looks else -1
        self.looks[level] = (seen(evidence), leak)

    def rows(self) -> Iterator[tuple[float, ...]]:
        """Each look with its label, its weight and its case at the end."""
        rest = len(self.looks) - 1
        for level, (look, leak) in self.looks.items():
            weight = 1.0 if rest == 0 else 0.5 if level == -1 else 0.5 / rest
            yield (*look, float(leak), weight, float(self.number))


def rows_of(case: Case, number: int) -> Iterator[tuple[float, ...]]:
    """The rows of one case."""
    detector = Detector(case.policy, STALL_TIMEOUT_S, case.series.interval)
    found: dict[tuple[int, float], Looked] = {}
    for sample in case.series.samples():
        detector.update(sample)
        began = case.starts is not None and sample.t >= case.starts
        for which, watch in enumerate(detector.watches):
            evidence, since = watch.make_evidence(), watch.suspected_since
            if evidence is None or since is None or evidence.share >= MOST:
                continue
            leak = began and watch.kind == case.kind
            if leak and case.series.leaked < LEAST_LEAKED * case.budget:
                continue  # too early: neither answer would be wrong
            found.setdefault((which, since), Looked(number)).add(evidence, leak)
    for looked in found.values():
        yield from looked.rows()


def chosen(every: int) -> list[Case]:
    """Each ``every``-th case of each family of the splits that may be learnt from."""
    cases, met = [], {}  # type: ignore[var-annotated]
    for case in (*cases_of(Split.DEVELOPMENT, False), *cases_of(Split.SEEN, False)):
        if case.kind == "Stall":
            continue
        key = case.family, case.kind
        met[key] = met.get(key, -1) + 1
        if met[key] % every == 0:
            cases.append(case)
    return cases


_cases: list[Case] = []


def _played(number: int) -> Matrix:
    rows = list(rows_of(_cases[number], number))
    return np.array(rows, dtype=float).reshape(len(rows), COLUMNS)


def played(cases: list[Case], processes: int) -> Rows:
    # Series are made of functions without a name: a case travels by its number.
    _cases[:] = cases
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, os.nice, (NICE,)) as pool:
        table = np.vstack(list(pool.map(_played, range(len(cases)))))
    return Rows(table[:, :-3], table[:, -3] > 0, table[:, -2], table[:, -1].astype(int))


def crossed(rows: Rows, cases: list[Case]) -> tuple[Rows, Matrix]:
    """The rows in the order of the parts, and what the weights of the other parts say of each."""
    # A checksum, and not hash(), so that each run deals the same parts.
    part = np.array([zlib.crc32(case.family.encode()) % PARTS for case in cases])[rows.case]
    order, stated = [], []
    for number in range(PARTS):
        here = np.flatnonzero(part == number)
        order.append(here)
        values = fit(rows.take(np.flatnonzero(part != number)))
        stated.append(log_odds(values, rows.seen[here]))
    return rows.take(np.concatenate(order)), np.concatenate(stated)


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parse.add_argument("--every", type=int, default=6, help="each family's N-th case")
    parse.add_argument("--jobs", type=int, default=2)
    flags = parse.parse_args()
    cases = chosen(flags.every)
    rows = played(cases, flags.jobs)
    values = fit(rows)
    error, bins = calibration(*crossed(rows, cases))
    figures = {
        "cases_count": len(cases),
        "rows_count": len(rows.leak),
        "calibration_ece_ratio": round(error, 4),
    }
    told = {"weights": {name: round(float(v), 3) for name, v in zip(NAMES, values, strict=True)}}
    for name, value in (figures | told["weights"]).items():
        print(f"{name:24} {value}")
    for one in bins:
        print(one)
    publish("odds-fit", figures, told | {"bins": bins})
    return 0


if __name__ == "__main__":
    sys.exit(main())
