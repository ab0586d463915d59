"""The leak lab and its score: what the figures of bench/detection.py stand on."""

from __future__ import annotations

import msgspec
import pytest

from bench.detection_score import Verdict, figures, wilson
from leaklab import splits
from leaklab.cases import Case, leaks, named, negatives
from leaklab.splits import LEAKS, Split


def cases(split: Split) -> list[Case]:
    return [*leaks(split, 1), *negatives(split, 2)]


def test_no_mechanism_is_in_two_splits() -> None:
    names = [
        name
        for split in Split
        for name in {mechanism.name for mechanism in LEAKS[split]} | set(splits.FAMILIES[split])
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("split", list(Split))
def test_names_are_unique_and_series_are_the_same_again(split: Split) -> None:
    first, second = cases(split), cases(split)
    assert len({case.name for case in first}) == len(first)
    for one, other in list(zip(first, second, strict=True))[::7]:
        samples = zip(range(50), one.series.samples(), other.series.samples(), strict=False)
        assert all(msgspec.json.encode(a) == msgspec.json.encode(b) for _, a, b in samples)


@pytest.mark.parametrize("split", list(Split))
def test_every_leak_has_spent_its_budget_by_the_end(split: Split) -> None:
    # What was seen was the test split once, and every leak of it was looked at then.
    for case in leaks(split, 1)[:: 25 if split is Split.SEEN else 1]:
        if case.series.interval >= 5 or case.name.startswith("method_cache-fast"):
            leaked = [case.series.leaked for _ in case.series.samples()]
            assert case.starts is not None
            assert leaked[int(case.starts / case.series.interval) - 1] == 0
            assert leaked[-1] > case.budget


def test_the_promised_rates_leak_at_those_rates() -> None:
    for case in named(Split.TEST):
        leak, starts = case.series.leak, case.starts or 0.0
        a_minute, an_hour = leak(starts + 60), leak(starts + 3600)
        assert a_minute == pytest.approx(400e6) or an_hour == pytest.approx(48 << 20)


def test_wilsons_interval() -> None:
    """Values of R's prop.test without continuity correction."""
    assert wilson(0, 0) is None
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    low, high = wilson(20, 20) or (0, 0)
    assert low == pytest.approx(0.8389, abs=1e-4)
    assert high == pytest.approx(1)


def test_figures_of_events() -> None:
    told = figures(
        [
            Verdict("a", "leak", True, 1.0, 10.0, 100.0, 0.2, True),
            Verdict("b", "leak", True, 1.0, 10.0, 100.0, 0.6, False, false=1),
            Verdict("c", "leak", True, 1.0),
            Verdict("d", "noise", False, 5.0, false=1, actions=1),
        ]
    )
    assert told["precision_ratio"] == 0.5
    assert told["recall_ratio"] == pytest.approx(2 / 3)
    assert (told["false_actions_count"], told["negative_replica_hours"]) == (1, 5.0)
    assert told["segment_top1_ratio"] == 0.5
    assert figures([])["precision_ratio"] is None
