"""How an engine of ``leaklab/series.py`` works, pauses and is read."""

from __future__ import annotations

import pytest

from leaklab.series import GIB, MIB, Series, flat


def steps(series: Series) -> list[int]:
    return [sample.load.steps_total or 0 for sample in series.samples()]


def test_a_pause_of_a_part_of_an_interval_counts_in_part() -> None:
    series = Series(duration=200, interval=10, paused=lambda t: 41 <= t < 46, fine=True)
    made = steps(series)
    whole = made[1] - made[0]
    assert whole == 200
    assert made[5] - made[4] == whole / 2
    assert made[6] - made[5] == whole


def test_no_request_ends_in_a_pause() -> None:
    still = Series(duration=60, paused=lambda t: t >= 20, fine=True)
    done = [sample.load.requests_total for sample in still.samples()]
    assert done[19] is not None
    assert done[19] > 0
    assert done[20:] == [done[19]] * 40


def test_a_page_is_as_old_as_its_last_reading() -> None:
    samples = list(Series(duration=12, read_every=5.0).samples())
    assert [sample.load_age_s for sample in samples] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert len({sample.load.steps_total for sample in samples[5:10]}) == 1
    assert samples[10].load.steps_total != samples[9].load.steps_total


def test_a_page_is_read_anew_after_a_restart() -> None:
    series = Series(duration=20, read_every=10.0, epoch=lambda t: 1 + (t >= 13))
    ages = [sample.load_age_s for sample in series.samples()]
    assert ages[12:15] == [2, 0, 1]


def test_without_a_page_the_load_has_no_age() -> None:
    assert all(sample.load_age_s is None for sample in Series(duration=5).samples())


def test_ratios_stay_what_they_are_and_counts_are_whole() -> None:
    series = Series(duration=3, counters={"kv_usage_ratio": flat(0.4), "waiting": flat(2.7)})
    for sample in series.samples():
        assert sample.load.kv_usage_ratio == pytest.approx(0.4)
        assert sample.load.waiting == 2


def test_processor_time_and_a_ledger_of_the_device_are_told() -> None:
    series = Series(
        duration=3,
        device=True,
        cpu_s=lambda t: 2 * t,
        ledger=flat(GIB),
        ledger_bound=2 * GIB,
        ledger_kind="device",
    )
    *_, last = series.samples()
    assert last.host.cpu_s == 4.0
    assert last.ledger is not None
    assert (last.ledger[0].kind, last.ledger[0].bytes) == ("device", GIB)
    assert next(Series(duration=1).samples()).host.cpu_s is None


def test_samples_are_the_same_each_time() -> None:
    series = Series(duration=30, noise=9 * MIB, read_every=4.0, leak=lambda t: 100 * t)
    assert list(series.samples()) == list(series.samples())
