"""The split of the recordings: what each lot draws."""

from __future__ import annotations

import pytest

from leaklab.recording.run import Injection
from leaklab.recording.runs import RUNS
from leaklab.recording.split import DRAWN, HELD_OUT, LOTS, SEEN, UNREAD, WHOLE, part


@pytest.mark.parametrize("seed", LOTS)
def test_a_lot_draws_a_third_or_all_of_its_leaks_and_of_its_healthy_mechanisms(seed: int) -> None:
    for names in LOTS[seed]:
        drawn = [name for name in names if part(name) == (DRAWN if seed in UNREAD else HELD_OUT)]
        assert len(drawn) == (len(names) if seed in WHOLE else len(names) // 3)
        assert {part(name) for name in set(names) - set(drawn)} <= {SEEN}


@pytest.mark.parametrize("seed", WHOLE)
def test_each_mechanism_of_a_whole_lot_has_one_run_which_says_what_it_holds(seed: int) -> None:
    leaks, healthy = LOTS[seed]
    runs = [run for run in RUNS if run.mechanism in leaks + healthy]
    assert sorted(run.mechanism for run in runs) == sorted(leaks + healthy)
    for run in runs:
        assert run.leaks == (run.mechanism in leaks)
        if isinstance(run.cause, Injection) and not run.leaks:
            assert run.cause.bound is not None
