"""Whether a revision leaks: what proves a yes or a no, and what is missing for either."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.growth import ReportedGrowth
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_operator.fleet.revisions import ReplicaPod
from plimsoll_operator.fleet.supervisor_metrics import SlowLeak, SupervisorMetrics
from plimsoll_operator.fleet.verdict import make_verdicts, may_change_with_time

MIB, HOUR = 1 << 20, 3600
MEMORY = MemoryPolicy(host=MemoryBudget(512 * MIB))
NEW, OLD = "new1", "old1"


def pods(count: int, revision: str = NEW, minute: int = 5) -> list[tuple[str, ReplicaPod]]:
    created = f"2026-01-01T00:{minute:02}:00Z"
    return [(created, ReplicaPod(f"q-{revision}-{n}", revision, f"{n}")) for n in range(count)]


def leak(pod: str, phase: str = "Confirmed", outcome: str = "") -> dict[str, Any]:
    opened = "2026-01-01T01:00:00Z"
    return {
        "metadata": {"creationTimestamp": opened},
        "spec": {"kind": "HostGrowth", "pod": pod, "openedAt": opened},
        "status": {"phase": phase} | ({"outcome": outcome} if outcome else {}),
    }


def seen(
    minutes: float, share: float = 0.0, requests: int = 9000, **more: Any
) -> SupervisorMetrics:
    growth = ReportedGrowth(int(share * 512 * MIB), int(minutes * 60), requests)
    return SupervisorMetrics(host=share, host_growth=growth, **more)


def only(
    metrics: list[SupervisorMetrics], incidents: Any = (), before: Any = None, memory: Any = MEMORY
) -> dict[str, Any]:
    """The verdict on a revision whose replicas have these ``metrics``."""
    own = pods(len(metrics))
    by_pod = {pod.pod: one for (_, pod), one in zip(own, metrics, strict=True)}
    (found,) = make_verdicts(own, incidents, by_pod, memory, before or {})
    return found


def test_the_leak_of_most_replicas_is_a_yes_also_of_a_single_one() -> None:
    assert only([seen(9)], [leak("q-new1-0")])["leaks"] == "Yes"
    three = [seen(9)] * 3
    found = only(three, [leak("q-new1-0"), leak("q-new1-2", "Resolved")])
    assert found["leaks"] == "Yes"
    assert "HostGrowth in 2 of 3 replicas" in found["message"]
    assert "minutesLeft" not in found


def test_a_suspect_revision_stays_one_after_its_incidents() -> None:
    before = {"suspectRevision": {"revision": NEW}}
    assert only([seen(90)], before=before)["leaks"] == "Yes"


@pytest.mark.parametrize(
    "incident",
    [leak("q-new1-0"), leak("q-new1-0", "Open"), leak("q-new1-0", "Resolved", "Recovered")],
)
def test_a_leak_in_a_minority_is_no_no(incident: Any) -> None:
    found = only([seen(90)] * 3, [incident])
    assert found["leaks"] == "Unknown"
    assert "q-new1-0" in found["message"]
    assert "minutesLeft" not in found, "more time alone decides nothing"


def test_a_suspicion_that_was_cleared_does_not_count() -> None:
    assert only([seen(90)] * 3, [leak("q-new1-0", "Resolved", "Cleared")])["leaks"] == "No"


def test_a_no_takes_time_and_requests() -> None:
    assert only([seen(31)])["leaks"] == "No"
    young = only([seen(12)])
    assert (young["leaks"], young["minutesLeft"]) == ("Unknown", 20), "18, in steps"
    few = only([seen(40, requests=50)])
    assert (few["leaks"], few["minutesLeft"]) == ("Unknown", 45), "another 50 take 40"
    idle = only([seen(600, requests=0)])
    assert idle["leaks"] == "Unknown"
    assert "processed requests" in idle["message"]
    assert "minutesLeft" not in idle


def test_growth_must_stay_within_the_budget_for_a_whole_window() -> None:
    fast = only([seen(60, share=0.1)])
    assert (fast["leaks"], fast["minutesLeft"]) == ("Unknown", 90), "10 % may take 2.4 hours"
    assert only([seen(145, share=0.1)])["leaks"] == "No"
    spent = only([seen(48 * 60, share=1.0)])
    assert spent["leaks"] == "Unknown"
    assert "exhausted in q-new1-0" in spent["message"]


def test_small_changes_of_the_growth_change_no_status() -> None:
    close = [only([seen(600, share=0.51 + n / 200), seen(9)]) for n in range(5)]
    assert all(one == close[0] for one in close)


def test_most_replicas_decide_and_not_the_newest_one() -> None:
    assert only([seen(31), seen(31), seen(1)])["leaks"] == "No"
    assert only([seen(31), seen(1), seen(1)])["minutesLeft"] == 30


def test_a_replica_that_nobody_sees_proves_nothing() -> None:
    found = only([SupervisorMetrics()])
    assert (found["leaks"], found["minutesLeft"]) == ("Unknown", 30)
    assert "known in too few" in found["message"]
    both = MemoryPolicy(host=MEMORY.host, device=MemoryBudget(512 * MIB))
    assert "device memory" in only([seen(90)], memory=both)["message"]
    assert "set memory.host" in only([seen(90)], memory=MemoryPolicy())["message"]


def test_a_slow_leak_is_no_no() -> None:
    slow = seen(900, slow_leaks=(SlowLeak("host", "anonymous", 1.0),))
    assert "slowly" in only([slow])["message"]


def test_a_no_outlives_a_restart_but_no_leak() -> None:
    before = {"verdicts": [{"revision": NEW, "leaks": "No"}]}
    assert only([seen(0), SupervisorMetrics()], before=before)["leaks"] == "No"
    assert only([seen(0)] * 2, [leak("q-new1-0")], before)["leaks"] == "Unknown"
    assert only([seen(0)] * 2, [leak("q-new1-0"), leak("q-new1-1")], before)["leaks"] == "Yes"


def test_each_revision_has_its_verdict_the_newest_first() -> None:
    both = [*pods(2, OLD, 1), *pods(1, NEW, 2), ("", ReplicaPod("x", "", "x"))]
    metrics = {pod.pod: seen(90) for _, pod in both}
    found = make_verdicts(both, [leak("q-new1-0")], metrics, MEMORY, {})
    assert [(one["revision"], one["leaks"]) for one in found] == [(NEW, "Yes"), (OLD, "No")]
    assert not may_change_with_time(found)
    many = [one for n in range(9) for one in pods(1, f"r{n}", n)]
    assert [one["revision"] for one in make_verdicts(many, [], {}, MEMORY, {})] == [
        "r8",
        "r7",
        "r6",
        "r5",
    ]


@given(
    st.lists(
        st.builds(
            seen,
            st.floats(0, 1e7),
            st.floats(0, 5),
            st.integers(0, 1 << 53),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_supervisors_report_there_is_an_answer_within_bounds(metrics: Any) -> None:
    found = only(metrics)
    assert found["leaks"] in ("No", "Unknown")
    assert 0 < found.get("minutesLeft", 1) <= 30 * 24 * 60
