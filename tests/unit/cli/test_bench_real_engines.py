"""The figures of the bench of real engines, from rows as its cases write them.

Tests ``bench/real_engines_figures.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import real_engines_figures as bench
from plimsoll_cli.figures import make_result


@pytest.mark.parametrize(("degrees", "exact"), [(9, 2.2622), (19, 2.0930), (60, 2.0003)])
def test_students_quantile(degrees: int, exact: float) -> None:
    assert bench.t_975(degrees) == pytest.approx(exact, abs=0.002)


def test_an_interval_of_pairs() -> None:
    rows = [pair(asked, 1000.0) for asked in (998.0, 1000.0) * 5]

    found = bench.figures(rows)

    assert found["probe_pairs_count"] == 10
    assert found["probe_loss_ratio"] == pytest.approx(0.001)
    half = 2.2622 * 0.001 * (10 / 9) ** 0.5 / 10**0.5
    assert found["probe_loss_ratio_high"] == pytest.approx(0.001 + half, rel=1e-3)
    assert found["probe_loss_ratio_low"] == pytest.approx(0.001 - half, rel=1e-2)


def test_one_pair_has_no_interval() -> None:
    assert "probe_loss_ratio" not in bench.figures([pair(1.0, 1.0)])
    with pytest.raises(ValueError, match="two values"):
        bench.interval([0.0])


def test_the_slowest_counts_and_a_miss_is_reported() -> None:
    rows = [leak(1, 40.0), leak(1, 55.0), leak(2, 50.0), leak(2, None), leak(1, 30.0, "device")]

    found = bench.figures(rows)

    assert (found["leak_confirm_s"], found["second_leak_confirm_s"]) == (55.0, 50.0)
    assert (found["leak_missed_count"], found["second_leak_missed_count"]) == (0, 1)
    assert found["device_leak_confirm_s"] == 30.0
    assert "second_device_leak_confirm_s" not in found
    assert (found["leaks_count"], found["segment_right_count"]) == (5, 4)
    assert found["process_right_count"] == 4


def test_a_young_stall_is_a_figure_of_its_own() -> None:
    rows = [stall("busy", 305.0, 12.0), stall("busy", 75.0, 31.0), stall("idle", 75.0, 33.0)]

    found = bench.figures(rows)

    assert (found["stall_busy_confirm_s"], found["young_stall_busy_confirm_s"]) == (12.0, 31.0)
    assert "stall_idle_confirm_s" not in found
    assert found["young_stall_idle_confirm_s"] == 33.0


def test_a_stall_in_the_first_minute_has_no_bound_and_is_told() -> None:
    rows = [stall("busy", 5.5, 129.0), stall("busy", 75.0, 31.0)]

    found = bench.figures(rows)

    assert found["young_stall_busy_confirm_s"] == 31.0
    assert found["first_minute_stall_busy_confirm_s"] == 129.0
    assert [case for case, *_ in bench.passed(rows)] == ["stall, busy, after 75 s of service"]


def test_health_is_added_up() -> None:
    rows = [healthy(90.0, {"200": 100, "0": 1}, suspected()), healthy(30.0, {"200": 50})]
    rows.append(healthy(60.0, {}, suspected(confirmed=True, actions=2)))

    found = bench.figures(rows)

    assert found["healthy_minutes"] == 3.0
    assert (found["healthy_requests_count"], found["healthy_requests_failed_count"]) == (150, 1)
    assert (found["healthy_confirmed_count"], found["healthy_actions_count"]) == (1, 2)
    assert found["healthy_suspicions_count"] == 1


def test_engines_judged_by_a_device_that_others_use_are_counted_apart() -> None:
    suspicion = suspected(confirmed=True, actions=1)
    rows = [healthy(90.0, {}), healthy(30.0, {}, suspicion) | {"whole_device": True}]

    found = bench.figures(rows)

    assert (found["healthy_minutes"], found["healthy_confirmed_count"]) == (1.5, 0)
    assert (found["whole_device_minutes"], found["whole_device_confirmed_count"]) == (0.5, 1)


def test_a_row_that_is_set_apart_counts_for_no_figure() -> None:
    apart = {"set_apart": "before the mend"}
    rows = [leak(1, 40.0), leak(2, 90.0) | apart, kill("core", 0), kill("core", 1) | apart]

    found = bench.figures(rows)

    assert (found["leaks_count"], found["leak_confirm_s"]) == (1, 40.0)
    assert "second_leak_confirm_s" not in found
    assert (found["core_kills_count"], found["orphan_processes_count"]) == (1, 0)
    assert "core killed" in [case for case, *_ in bench.passed(rows)]


def test_kills_and_what_failed() -> None:
    rows = [kill("frontend", 0), kill("core", 2), {"case": "failed"}]

    found = bench.figures(rows)

    assert (found["orphan_processes_count"], found["core_kills_count"]) == (2, 1)
    assert found["failed_steps_count"] == 1


def test_every_figure_has_a_unit() -> None:
    rows = [pair(1.0, 1.0), pair(1.0, 2.0), leak(1, 1.0), leak(2, 1.0, "device"), kill("core", 0)]
    rows += [stall("busy", 305.0, 1.0), stall("idle", 75.0, 1.0), healthy(1.0, {})]
    rows.append({"case": "ready", "life": 1, "seconds": 40.0})

    assert make_result("real-engines", bench.figures(rows), [])["figures"]["ready_s"] == 40.0


def test_what_passed_every_time() -> None:
    rows = [kill("frontend", 0), kill("frontend", 0), kill("core", 1), leak(1, 40.0)]
    rows += [leak(1, None, "device"), stall("busy", 75.0, 30.0), healthy(60.0, {"200": 5})]

    found = bench.passed(rows)

    assert found == [
        ("quiet under load", None, "1.0 min in all, 5 requests"),
        ("leak of 2 MiB/s in core, host memory", 40.0, "once"),
        ("stall, busy, after 75 s of service", 30.0, "once"),
        ("frontend killed", 9.0, "until no process of it was left, 2 times"),
    ]


def test_a_case_that_took_too_long_did_not_pass() -> None:
    late = [leak(1, 60.5), stall("busy", 305.0, 20.5), stall("idle", 75.0, 45.5)]
    assert bench.passed(late) == []


def test_requests_of_leak_restarts_are_added_up() -> None:
    row = {"case": "leak_restart", "restarted": True, "answers": {"200": 9, "0": 1}}

    found = bench.figures([row, row | {"restarted": False, "answers": {"200": 5, "503": 2}}])

    assert (found["leak_restarts_count"], found["requests_count"]) == (1, 17)
    assert found["requests_failed_count"] == 3


def test_quiet_is_not_said_of_a_replica_that_failed_a_request() -> None:
    assert bench.passed([healthy(60.0, {"200": 5, "0": 1})]) == []


def test_nothing_ran() -> None:
    found = bench.figures([])

    assert not [key for key in found if key.endswith("_s")]


def pair(asked: float, unasked: float) -> dict[str, Any]:
    return {"case": "pair", "asked_tok_s": asked, "unasked_tok_s": unasked}


def leak(life: int, seconds: float | None, memory: str = "host") -> dict[str, Any]:
    named = "malloc_in_use" if seconds else None
    return {
        "case": "leak", "part": "core", "memory": memory, "life": life, "seconds": seconds,
        "segment": named, "segment_due": "malloc_in_use", "process": "worker" if seconds else None,
        "process_due": "worker",
    }  # fmt: skip


def stall(how: str, served_s: float, seconds: float) -> dict[str, Any]:
    return {"case": "stall", "how": how, "served_s": served_s, "seconds": seconds}


def kill(part: str, left: int) -> dict[str, Any]:
    return {"case": "kill", "part": part, "left": left, "seconds": 9.0}


def healthy(seconds: float, answers: dict[str, int], *incidents: Any) -> dict[str, Any]:
    return {
        "case": "healthy", "replica": "quiet", "seconds": seconds, "answers": answers,
        "incidents": list(incidents),
    }  # fmt: skip


def suspected(confirmed: bool = False, actions: int = 0) -> dict[str, Any]:
    return {"name": "one", "confirmed": confirmed, "actions": actions}


def test_the_load_of_a_run_is_that_of_its_rows() -> None:
    rows = [{"load_1min": 2.4}, {"load_1min": 11.6}, {}]

    assert bench.load_average(rows) == "2 to 12"
    assert bench.load_average([{}]) is None, "rows of earlier runs do not say it"
