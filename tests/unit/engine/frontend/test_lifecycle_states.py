"""The engine's state machine.

Tests ``frontend/lifecycle.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.admin import EngineState as S
from plimsoll_engine.frontend.lifecycle import TRANSITIONS, IllegalTransitionError, Lifecycle


@given(st.lists(st.sampled_from(S), max_size=30))
def test_only_declared_transitions_happen(path: list[S]) -> None:
    seen: list[tuple[S, S]] = []
    lifecycle = Lifecycle(lambda before, after: seen.append((before, after)))
    for state in path:
        before = lifecycle.state
        if state is before or state in TRANSITIONS[before]:
            lifecycle.move_to(state)
            assert lifecycle.state is state
        else:
            with pytest.raises(IllegalTransitionError):
                lifecycle.move_to(state)
            assert lifecycle.state is before
        assert not (lifecycle.is_ready and not lifecycle.is_admitting)
    assert all(after in TRANSITIONS[before] for before, after in seen)


def test_every_state_can_reach_an_end() -> None:
    ends = {state for state, follows in TRANSITIONS.items() if not follows}
    assert ends == {S.STOPPED, S.FAILED}
    for state, follows in TRANSITIONS.items():
        assert state in ends or S.FAILED in follows


def test_a_worker_restart_keeps_the_replica_in_service() -> None:
    lifecycle = Lifecycle()
    for state in (S.WARMING, S.SERVING, S.RESTARTING):
        lifecycle.move_to(state)
    assert lifecycle.is_ready
    assert lifecycle.is_admitting


@pytest.mark.parametrize("state", list(S))
def test_an_engine_is_warming_until_it_has_served_once(state: S) -> None:
    """Its liveness must not depend on what comes later: restarts, drains, its end."""
    lifecycle = Lifecycle()
    lifecycle.state = state
    assert lifecycle.is_warming == (state in {S.STARTING, S.WARMING})


@pytest.mark.parametrize("state", [S.DRAINING, S.DRAINED, S.STOPPING, S.FAILED])
def test_a_closed_engine_admits_nobody(state: S) -> None:
    lifecycle = Lifecycle()
    lifecycle.state = state
    assert not lifecycle.is_admitting
    assert not lifecycle.is_ready
