"""Which incidents the operator deletes, however many a pod writes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.leakincident import MAX_INCIDENTS_PER_POD
from plimsoll_operator.fleet import incidents
from plimsoll_operator.fleet.incidents import (
    MAX_KEPT_INCIDENTS_PER_NAMESPACE,
    MAX_KEPT_INCIDENTS_PER_POD,
    MAX_OPEN_INCIDENTS,
)

NOW = "2026-01-02T00:00:00Z"


def surplus(some: Any, kept: int, now: str, elsewhere: int = 0) -> list[dict[str, Any]]:
    return incidents.find_surplus_incidents(some, kept, now, 600.0, elsewhere)


def incident(n: int, pod: str = "", phase: str | None = "Resolved", day: int = 1) -> dict[str, Any]:
    created = f"2026-01-{day:02d}T{n // 3600:02d}:{n // 60 % 60:02d}:{n % 60:02d}Z"
    return {
        "metadata": {"name": f"i{n}", "uid": f"u{n}", "creationTimestamp": created},
        "spec": {"pod": pod or f"p{n}", "kind": "Stall"},
        "status": {"phase": phase} if phase else {},
    }


def names(found: list[dict[str, Any]]) -> list[str]:
    return [one["metadata"]["name"] for one in found]


def test_the_oldest_ended_incidents_go() -> None:
    some = [incident(n, phase="Open" if n == 1 else "Resolved") for n in (3, 1, 2, 4)]
    assert names(surplus(some, 2, NOW)) == ["i2"]


def test_open_incidents_of_one_pod_go_as_well_but_the_newest_confirmed_stays() -> None:
    some = [incident(n, "pod", "Open") for n in range(MAX_INCIDENTS_PER_POD)]
    some[0]["status"] = {"phase": "Confirmed"}
    gone = names(surplus(some, 50, NOW))
    assert len(gone) == MAX_INCIDENTS_PER_POD - MAX_KEPT_INCIDENTS_PER_POD
    assert gone == [f"i{n}" for n in range(1, 11)], "the oldest, but not the confirmed one"
    some[5]["status"] = {"phase": "Resolved"}
    assert "i5" in names(surplus(some, 50, NOW)), "ended ones go first"


def test_one_pod_displaces_no_incident_of_another() -> None:
    others = [incident(n, phase="Confirmed") for n in range(20)]
    flood = [incident(100 + n, "hostile", "Open") for n in range(MAX_INCIDENTS_PER_POD)]
    gone = surplus([*others, *flood], 50, NOW)
    assert {one["spec"]["pod"] for one in gone} == {"hostile"}


def test_a_service_and_a_namespace_keep_so_many() -> None:
    some = [incident(n, phase="AwaitingSlot") for n in range(MAX_OPEN_INCIDENTS + 3)]
    assert names(surplus(some, 50, NOW)) == ["i0", "i1", "i2"]
    few = [incident(n) for n in range(5)]
    assert surplus(few, 50, NOW, MAX_KEPT_INCIDENTS_PER_NAMESPACE - 5) == []
    assert names(surplus(few, 50, NOW, MAX_KEPT_INCIDENTS_PER_NAMESPACE - 3)) == ["i0", "i1"]


def test_names_come_back_slowly() -> None:
    """Otherwise a pod writes as fast as the operator deletes, and etcd keeps both histories."""
    young = [incident(n, "pod", day=2) for n in range(MAX_INCIDENTS_PER_POD)]
    assert surplus(young, 1, "2026-01-02T00:09:00Z") == []
    assert (
        len(surplus(young, 50, "2026-01-02T00:11:00Z"))
        == MAX_INCIDENTS_PER_POD - MAX_KEPT_INCIDENTS_PER_POD
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 3), st.sampled_from([None, *IncidentPhase])),
        max_size=60,
        unique_by=lambda one: one[0],
    ),
    st.integers(0, 20),
)
def test_whatever_is_written_the_bounds_hold(
    some: list[tuple[int, int, str | None]], kept: int
) -> None:
    written = [incident(n, f"p{pod}", phase) for n, pod, phase in some]
    gone = {one["metadata"]["name"] for one in surplus(written, kept, NOW)}
    left = [one for one in written if one["metadata"]["name"] not in gone]
    for pod in range(4):
        assert (
            sum(one["spec"]["pod"] == f"p{pod}" for one in left) <= MAX_KEPT_INCIDENTS_PER_POD + 1
        )
    ended = [one for one in left if not incidents._is_open(one)]
    assert len(ended) <= kept + 1
    assert len(gone) + len(left) == len(written)
    confirmed = [one for one in written if incidents._is_confirmed(one)]
    if confirmed:
        newest = max(confirmed, key=lambda one: one["metadata"]["creationTimestamp"])
        assert newest in left
