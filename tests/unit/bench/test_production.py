"""What the supervisor would do to series of production containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.production import Row, figures, judged, lives, read, series
from leaklab.series import DAY, GIB, HOUR, MIB

LIMIT = 2 * GIB


def day(mib_an_hour: float, since: float) -> list[tuple[float, int, int | None]]:
    """A day, a sample a minute: steady at first, then memory that grows."""
    return [
        (t, GIB + int(MIB * mib_an_hour * max(0.0, t - since) / HOUR), LIMIT)
        for t in (60.0 * minute for minute in range(int(DAY / 60)))
    ]


def test_a_container_that_stays_as_it_is_is_left_alone() -> None:
    row = judged("flat", list(lives(day(0.0, 0.0))), 12 * HOUR)
    assert row.judged_hours == pytest.approx(12.0, abs=0.1)
    assert row == Row("flat", row.judged_hours, 0, 0, 0, 0, 0, True, True)


def test_a_leak_that_nears_the_limit_is_restarted_and_its_death_was_told() -> None:
    points = [one for one in day(250.0, 16 * HOUR) if one[1] < LIMIT]
    row = judged("leak", list(lives(points)), 12 * HOUR)
    assert row.confirmed == row.restarts == 1
    assert (row.deaths, row.warned) == (1, 1)


def test_a_fall_below_half_is_another_life() -> None:
    samples = list(lives([(0.0, 100, None), (60.0, 90, None), (120.0, 40, None), (180.0, 60, 9)]))
    assert [sample.epoch for sample in samples] == [1, 1, 2, 2]


def test_restarts_have_the_interval_of_their_count() -> None:
    rows = [Row("a", 4000.0, 2, 1, 1, 0, 0), Row("b", 1000.0, 0, 0, 0, 2, 1)]
    found = figures(rows)
    assert found["restarts_per_10000_hours_count"] == 2.0
    assert found["restarts_per_10000_hours_low_count"] == pytest.approx(0.05, abs=0.01)
    assert found["restarts_per_10000_hours_high_count"] == pytest.approx(11.14, abs=0.01)
    assert (found["deaths_count"], found["deaths_warned_count"]) == (2, 1)


def test_a_line_that_is_no_point_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("0,100,\n60,110,200\n")
    assert read(file) == ("a", [(0.0, 100, None), (60.0, 110, 200)])
    columns = "currentTime,totalMemory,usedMemory\n"
    file.write_text(columns + "1970-01-01 00:01:00+00:00,9,4\n")
    assert read(file) == ("a", [(60.0, 4, 9)])
    file.write_text("0,100\nt,size\n")
    with pytest.raises(SystemExit, match=r"a\.csv:2"):
        read(file)


def test_the_pods_of_a_workload_follow_each_other(tmp_path: Path) -> None:
    columns = "Time,PodName,MemoryUsage(Mi),MemoryUsageRate(%)\n"
    for day, pod in (("30", "web-5f55b6cf68-qmx8k"), ("29", "web-5f55b6cf68-77cfw")):
        at = f"2023-01-{day} 08:00:00.9 +0000 UTC m=+0.1"
        lines = f"{at},{pod},50,25\n{at},{pod},0,0\n"
        (tmp_path / f"{pod}.csv").write_text(columns + lines)
    (name, samples), *others = series(tmp_path).items()
    assert (name, others) == ("web", [])
    assert [(one.epoch, one.host.rss_anon, one.host.cgroup_limit) for one in samples] == [
        (1, 50 * MIB, 200 * MIB),
        (2, 50 * MIB, 200 * MIB),
    ]
    assert samples[1].t - samples[0].t == DAY


def test_a_pause_is_not_judged() -> None:
    points = [point for point in day(0.0, 0.0) if not 16 <= point[0] / HOUR < 20]
    assert judged("flat", list(lives(points)), 12 * HOUR).judged_hours == pytest.approx(8, abs=0.1)
