"""Runs a generated series through a detector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from leaklab.series import GIB, MIB, Series
from plimsoll_api.assessment import Assessment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_sidecar.detect.detector import Detector


@dataclass
class Outcome:
    """What was suspected first, when, and when a budget was first called spent."""

    warm_t: float | None = None
    first: dict[IncidentKind, tuple[float, Suspicion]] = field(default_factory=dict)
    suspected_samples: int = 0
    over_t: float | None = None
    last: Assessment | None = None


@pytest.fixture
def judge() -> Callable[..., Outcome]:
    def run(
        series: Series,
        budget: int = 512 * MIB,
        window: float = 3600.0,
        warmup: float = 60.0,
        stall: float = 30.0,
    ) -> Outcome:
        policy = MemoryPolicy(
            host=MemoryBudget(budget, window, 6 * GIB),
            device=MemoryBudget(budget, window) if series.device else None,
            warmup_s=warmup,
        )
        detector, outcome = Detector(policy, stall, series.interval), Outcome()
        for sample in series.samples():
            assessment = outcome.last = detector.update(sample)
            if assessment.warm and outcome.warm_t is None:
                outcome.warm_t = sample.t
            outcome.suspected_samples += bool(assessment.suspicions)
            for suspicion in assessment.suspicions:
                outcome.first.setdefault(suspicion.kind, (sample.t, suspicion))
                if suspicion.over_budget and outcome.over_t is None:
                    outcome.over_t = sample.t
        return outcome

    return run
