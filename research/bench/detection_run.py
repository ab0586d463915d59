"""One generated case, played: what the detector, the baselines and the plots are given."""

from __future__ import annotations

import numpy as np

from bench.detection_score import Verdict
from leaklab.cases import Case
from leaklab.series import GIB, LIMIT
from plimsoll_api.trace import Sample

DEVICE_LIMIT = 80.0 * GIB


class Run:
    """A case's samples, generated once, with the series that simple rules see."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.samples: list[Sample] = []
        leaked: list[float] = []
        for sample in case.series.samples():
            self.samples.append(sample)
            leaked.append(case.series.leaked)
        self.leaked = np.array(leaked)
        self.t = np.array([sample.t for sample in self.samples])
        self.sizes = np.array([_size(sample) for sample in self.samples], dtype=float)
        self.limit = DEVICE_LIMIT if case.series.device else float(LIMIT)

    def series(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Times, sizes and the limit: what a rule is given."""
        return self.t, self.sizes, self.limit

    def leaked_at(self, t: float) -> float:
        return float(self.leaked[min(len(self.t) - 1, int(np.searchsorted(self.t, t)))])

    def verdict(self) -> Verdict:
        case = self.case
        return Verdict(case.name, case.family, case.starts is not None, self.t[-1] / 3600)

    def found(self, verdict: Verdict, t: float) -> None:
        assert self.case.starts is not None
        verdict.delay_s, verdict.leaked = t - self.case.starts, self.leaked_at(t)
        if self.case.kind != "Stall":
            verdict.consumed = verdict.leaked / self.case.budget


def _size(sample: Sample) -> int:
    if sample.device:
        return sum(device.used or 0 for device in sample.device)
    return (sample.host.cgroup_anon or 0) + (sample.host.cgroup_shmem or 0)
