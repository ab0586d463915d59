"""Which requests a worker runs on for nobody.

Tests ``frontend/observability/abandoned.py``.
"""

from __future__ import annotations

from plimsoll_engine.frontend.observability.abandoned import (
    MAX_REPORTS_WITHOUT_CLIENT,
    AbandonedTracker,
)


def test_a_request_is_abandoned_once_its_abort_is_long_overdue() -> None:
    waited_for = {"a", "b"}
    abandoned = AbandonedTracker(waited_for.__contains__)
    for _ in range(3 * MAX_REPORTS_WITHOUT_CLIENT):
        assert abandoned.update(["a", "b"]) is None
    waited_for.remove("b")
    for _ in range(MAX_REPORTS_WITHOUT_CLIENT):
        assert abandoned.update(["a", "b"]) is None
    assert abandoned.update(["a", "b"]) == ["b"]
    assert abandoned.update(["a", "b"]) is None, "told once"
    assert abandoned.update(["a"]) == [], "its end is told too"


def test_constant_aborts_under_way_are_no_loss() -> None:
    """Each report names requests that were just given up, never one for long."""
    abandoned = AbandonedTracker(lambda name: False)
    for turn in range(200):
        running = [str(number) for number in range(turn, turn + MAX_REPORTS_WITHOUT_CLIENT)]
        assert abandoned.update(running) is None


def test_a_request_that_is_waited_for_again_begins_anew() -> None:
    waited_for: set[str] = set()
    abandoned = AbandonedTracker(waited_for.__contains__)
    for _ in range(MAX_REPORTS_WITHOUT_CLIENT):
        abandoned.update(["carried"])
    waited_for.add("carried")
    assert abandoned.update(["carried"]) is None
    waited_for.clear()
    assert abandoned.update(["carried"]) is None
