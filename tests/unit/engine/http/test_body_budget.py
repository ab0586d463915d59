"""The memory for bodies: bounded in all and for one client, and always given back.

Tests ``http/budget.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.http.budget import BodyBudget, BodyBudgetExceededError
from plimsoll_engine.http.limits import MAX_SMALL_BODY_BYTES

MIB = 1 << 20


def test_one_client_has_half_and_others_the_rest() -> None:
    budget = BodyBudget(lambda: 8 * MIB, 10)
    with (
        budget.open_reservation("a") as first,
        budget.open_reservation("a") as second,
        budget.open_reservation("b") as other,
    ):
        first.reserve(4 * MIB)
        with pytest.raises(BodyBudgetExceededError, match="your other requests") as refused:
            second.reserve(MIB)
        assert refused.value.is_client_share
        other.reserve(3 * MIB)
        with budget.open_reservation("c") as third:
            with pytest.raises(BodyBudgetExceededError, match="retry later") as refused:
                third.reserve(2 * MIB)
            assert not refused.value.is_client_share
            third.reserve(MIB)
    with budget.open_reservation("c") as later:
        later.reserve(4 * MIB)


def test_small_bodies_are_never_refused() -> None:
    budget = BodyBudget(lambda: MIB, 10)
    with budget.open_reservation("a") as large, budget.open_reservation("a") as small:
        large.reserve(MIB // 2)
        small.reserve(MAX_SMALL_BODY_BYTES)
        small.add_held(MAX_SMALL_BODY_BYTES)
        assert budget.held_bytes == MAX_SMALL_BODY_BYTES <= budget.max_held_bytes


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3 * MIB)), max_size=30))
def test_whatever_comes_stays_within_the_bound_and_goes(bodies: list[tuple[str, int]]) -> None:
    budget = BodyBudget(lambda: 4 * MIB, len(bodies))
    opened = []
    for client, size in bodies:
        reservation = budget.open_reservation(client)
        try:
            reservation.reserve(size)
        except BodyBudgetExceededError:
            assert size > MAX_SMALL_BODY_BYTES
        else:
            reservation.add_held(size)
        opened.append(reservation)
        assert budget.held_bytes <= budget.max_held_bytes
    for reservation in opened:
        reservation.__exit__()
    assert budget.held_bytes == 0
    with budget.open_reservation("a") as whole:
        whole.reserve(2 * MIB)
