"""What the operator keeps of the growth that supervisors have learned, and from whom."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.decoding import MalformedError
from plimsoll_api.growth import MAX_REPORTED_BYTES
from plimsoll_api.learned import (
    MAX_DAILY_FALL_FACTOR,
    MAX_LEARNED_BYTES,
    MAX_LEARNED_WORKLOADS,
    MAX_OBSERVED_H,
    MAX_OBSERVED_S,
    LearnedMemory,
    LearnedWorkload,
    decode_learned_workloads,
    encode_learned_workloads,
)
from plimsoll_operator.fleet.learned import make_learned_file
from plimsoll_operator.fleet.replicas import Replica
from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics, parse_metrics_page
from plimsoll_sidecar.record.metrics import Metrics

MIB, GIB = 1 << 20, 1 << 30
HOUR_S, DAY_S = 3600.0, 86400
NOW = 500_000 * HOUR_S


def lesson(
    budget: int | None = 600 * MIB, seen_s: int = DAY_S, gain: int = 400 * MIB
) -> SupervisorMetrics:
    return SupervisorMetrics(
        host_learned=LearnedMemory(seen_s, (gain, gain, gain), 4 * GIB, budget)
    )


def pods(count: int, revision: str = "r1", workload: str = "") -> list[Replica]:
    return [Replica(f"{revision}-{index}", revision, workload) for index in range(count)]


def of(text: str, workload: str = "") -> LearnedWorkload:
    (found,) = [one for one in decode_learned_workloads(text.encode()) if one.workload == workload]
    return found


def host(text: str) -> LearnedMemory:
    found = of(text).host
    assert found is not None
    return found


def told(before: str, hours: float, *metrics: SupervisorMetrics, revision: str = "r1") -> str:
    replicas = pods(len(metrics), revision)
    seen = {one.pod: figure for one, figure in zip(replicas, metrics, strict=True)}
    return make_learned_file(before, replicas, [], seen, NOW + hours * HOUR_S)


def test_a_service_keeps_what_its_replica_has_learned() -> None:
    text = told("", 0, lesson())
    assert of(text) == LearnedWorkload("", "r1", 500_000, host=lesson().host_learned)
    assert told(text, 24, SupervisorMetrics()) == text, "its pods know nothing"
    assert make_learned_file(text, [], [], {}, NOW + HOUR_S) == text, "it has no pods"
    assert make_learned_file(text, [], [], {}, NOW + (MAX_OBSERVED_H + 1) * HOUR_S) == ""


def test_nothing_is_published_before_anything_is_known() -> None:
    assert told("", 0, SupervisorMetrics(), SupervisorMetrics()) == ""


def test_a_service_that_learns_nothing_new_costs_no_write() -> None:
    text = told("", 0, lesson())
    assert told(text, 1, lesson(615 * MIB, DAY_S + 3600, 410 * MIB)) == text
    assert told(text, 30, lesson(700 * MIB)) != text
    learning = told("", 0, lesson(None, 3600))
    assert told(learning, 0.4, lesson(None, 9000)) == learning, "once an hour"
    assert host(told(learning, 1, lesson(None, 9000))).seen_s == 7200


def test_one_replica_of_three_does_not_raise_the_budget() -> None:
    text = told("", 0, lesson(), lesson(10 * GIB, gain=8 * GIB), lesson(620 * MIB))
    assert (host(text).budget, host(text).gains[0]) == (620 * MIB, 400 * MIB)


def test_a_replica_that_has_just_begun_does_not_lower_what_is_known() -> None:
    assert host(told("", 0, lesson(), lesson(None, 3600, 0), lesson(None, 60, 0))).gains[2] > 0


def test_a_replica_with_a_leak_teaches_nothing() -> None:
    incidents = [{"spec": {"pod": "r1-0", "kind": "HostGrowth"}, "status": {"phase": "Open"}}]
    metrics = {"r1-0": lesson(10 * GIB)}
    assert make_learned_file("", pods(1), incidents, metrics, NOW) == ""
    metrics["r1-1"] = lesson()
    assert host(make_learned_file("", pods(2), incidents, metrics, NOW)).budget == 600 * MIB


def test_a_budget_rises_by_a_quarter_a_day_and_falls_by_a_tenth() -> None:
    text = told("", 0, lesson(1000 * MIB))
    assert host(told(text, 24, lesson(8 * GIB))).budget == 1250 * MIB
    assert host(told(text, 24, lesson(MIB))).budget == 900 * MIB
    long_after = host(told(text, 10 * 24, lesson(MIB))).budget
    assert long_after == int(1000 * MIB * MAX_DAILY_FALL_FACTOR), (
        "a month without the operator is one step"
    )


def test_the_next_revision_begins_with_the_budget_and_learns_its_own_growth() -> None:
    text = told("", 0, lesson())
    after = told(text, 1, lesson(None, 3600, MIB), revision="r2")
    assert of(after).revision == "r2"
    assert host(after) == LearnedMemory(3600, (MIB, MIB, MIB), 4 * GIB, 600 * MIB)
    assert host(told(text, 1, SupervisorMetrics(), revision="r2")) == LearnedMemory(
        budget=600 * MIB
    )


def test_the_revision_of_the_newest_pod_counts() -> None:
    replicas = [*pods(2, "r1"), *pods(1, "r2")]
    metrics = {one.pod: lesson(GIB if one.revision == "r2" else 2 * GIB) for one in replicas}
    found = of(make_learned_file("", replicas, [], metrics, NOW))
    assert (found.revision, found.host and found.host.budget) == ("r2", GIB)


def test_each_workload_of_a_policy_learns_for_itself() -> None:
    replicas = [*pods(1, "a", "Deployment/a"), *pods(1, "b", "Deployment/b")]
    metrics = {"a-0": lesson(GIB), "b-0": lesson(2 * GIB)}
    text = make_learned_file("", replicas, [], metrics, NOW)
    sizes = [one.host.budget for one in decode_learned_workloads(text.encode()) if one.host]
    assert sizes == [GIB, 2 * GIB]


def test_a_policy_keeps_so_many_workloads_within_the_size() -> None:
    most = LearnedMemory(
        MAX_OBSERVED_S, (MAX_REPORTED_BYTES,) * 3, MAX_REPORTED_BYTES, MAX_REPORTED_BYTES
    )
    figure = SupervisorMetrics(host_learned=most, device_learned=most)
    replicas = [Replica(f"pod-{n}", "r" * 63, f"{n:04}".rjust(317, "w")) for n in range(200)]
    text = make_learned_file("", replicas, [], {one.pod: figure for one in replicas}, NOW)
    assert len(decode_learned_workloads(text.encode())) == MAX_LEARNED_WORKLOADS
    assert len(text) < MAX_LEARNED_BYTES


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"workload":"","revision":"r1","at":-1}]', "[]" * 9]
)
def test_a_file_that_someone_damaged_is_made_again(text: str) -> None:
    assert host(told(text, 0, lesson())).budget == 600 * MIB


def test_an_hour_in_the_future_stops_nothing() -> None:
    workload = LearnedWorkload("", "r1", 1 << 32, host=LearnedMemory(budget=MIB))
    later = encode_learned_workloads([workload]).decode()
    text = told(later, 0, lesson())
    assert of(text).at == 500_000
    assert of(told(text, 24, lesson())).host != of(text).host


def test_the_operator_reads_what_a_supervisor_exports() -> None:
    metrics = Metrics()
    known = lesson().host_learned
    assert known is not None
    metrics.export_learned_budgets({"host": known}, {})
    assert parse_metrics_page(metrics.render()).host_learned == known
    assert parse_metrics_page(metrics.render()).device_learned is None
    metrics.export_learned_budgets({"host": LearnedMemory(60, (0, 0, 0), 1)}, {})
    assert parse_metrics_page(metrics.render()).host_learned == LearnedMemory(60, (0, 0, 0), 1)
    metrics.export_learned_budgets({}, {})
    assert parse_metrics_page(metrics.render()).host_learned is None


SIZES = st.integers(0, MAX_REPORTED_BYTES)
LESSONS = st.builds(
    LearnedMemory,
    st.integers(0, MAX_OBSERVED_S),
    st.tuples(SIZES, SIZES, SIZES),
    SIZES,
    st.none() | st.integers(1, MAX_REPORTED_BYTES),
)


@given(st.lists(st.lists(st.none() | LESSONS, min_size=1, max_size=4), max_size=6), st.data())
def test_what_is_published_can_always_be_read(
    rounds: list[list[LearnedMemory | None]], data: Any
) -> None:
    text, hours = "", 0.0
    for lessons in rounds:
        hours += data.draw(st.floats(0, 100))
        seen = [SupervisorMetrics(host_learned=one) for one in lessons]
        text = told(text, hours, *seen, revision=data.draw(st.sampled_from(("r1", "r2"))))
        if text:
            decode_learned_workloads(text.encode())


def test_too_large_a_file_is_refused() -> None:
    with pytest.raises(MalformedError, match="128 KiB"):
        decode_learned_workloads(b" " * (MAX_LEARNED_BYTES + 1))
