"""The other rules that detection is compared with.

Tests ``bench/baselines.py`` and ``bench/adwin.py``.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bench import adwin
from bench.baselines import BASELINES, REARM_S, Array, alarms

MIB = 1 << 20
LIMIT = 6144.0 * MIB
CHOICE = (2e-3, 64.0, 1)


def sizes(rise_mib: float) -> tuple[Array, Array]:
    """Two hours under noise of 10 MiB, and at their middle a step."""
    t = 10 * np.arange(720, dtype=np.float64)
    noise = np.random.default_rng(18).normal(0, 10, len(t))
    return t, (3000 + noise + np.where(t >= 3600, rise_mib, 0)) * MIB


def test_adwin_tells_a_rise_soon_and_no_fall_and_no_noise() -> None:
    (first, *_) = adwin.rule(*sizes(300.0), LIMIT, CHOICE)
    assert 3600 <= first <= 3900
    assert len(adwin.rule(*sizes(-300.0), LIMIT, CHOICE)) == 0
    assert len(adwin.rule(*sizes(0.0), LIMIT, CHOICE)) == 0


def test_adwins_parameters_are_what_they_say() -> None:
    t, x = sizes(300.0)
    soon, later = (adwin.rule(t, x, LIMIT, (2e-3, 64.0, clock))[0] for clock in (1, 32))
    assert soon < later <= soon + 320
    coarse = (1e-12, 6144.0, 1)
    assert len(adwin.rule(*sizes(30.0), LIMIT, coarse)) == 0, "a rise of half a percent"


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"precog", "precog_filtered"}))
def test_every_rule_keeps_silent_for_an_hour_after_an_alarm(name: str) -> None:
    """A leak of 1 GiB an hour, under each choice of parameters."""
    t = 10 * np.arange(1800, dtype=np.float64)
    x = 1024.0 * MIB + t * 1024 * MIB / 3600
    for choice in BASELINES[name].choices:
        times = alarms(BASELINES[name], t, x, LIMIT, choice)
        assert all(later - earlier >= REARM_S for earlier, later in pairwise(times))
        assert all(at >= 60 for at in times)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("points", [0, 1, 2, 70])
def test_no_rule_judges_a_life_that_is_too_short(name: str, points: int) -> None:
    """An engine that restarts soon leaves a minute of samples, or one."""
    t = np.arange(points, dtype=np.float64)
    for choice in BASELINES[name].choices:
        assert alarms(BASELINES[name], t, np.full(points, 1.0), LIMIT, choice) == []
