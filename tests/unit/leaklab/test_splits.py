"""The splits of ``leaklab/cases.py``, ``leaklab/splits.py`` and ``leaklab/triggered.py``: none
shares a family with another, and none changes once it is judged."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import pytest

from leaklab import editions, splits
from leaklab.cases import Case, leaks, named, negatives, stalls
from leaklab.editions import Edition, Watched
from leaklab.healthy.host import kernels
from leaklab.healthy.steps import pauses, turns
from leaklab.series import HOUR, MIB, Build
from leaklab.splits import EDITIONS, HANGS, LEAKS, Split
from leaklab.triggered import triggers
from leaklab.views import HOURS
from tests.leak_cases import RUNS, hanging_cases, healthy_cases, leaking_cases, strata

INTERVALS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
FROZEN = {editions.TENTH.name: "60d7fecfc9af1feb", editions.ELEVENTH.name: "9599a42589a623c5"}
"""What is judged once must not change, nor what moves to the seen split: write another edition.
Both have changed once since they were judged, when healthy engines began to spend their budget."""


def cases_of(edition: Edition) -> list[Case]:
    if EDITIONS[Split.TEST] == (edition,):
        return [*healthy_cases(), *leaking_cases(), *hanging_cases()]
    split = next(split for split, of in EDITIONS.items() if edition in of)
    families: dict[str, Build] = {
        name: build
        for name, build in splits.FAMILIES[split].items()
        if isinstance(build, Watched) and build.edition == edition
    }
    grows = {f"leak {mechanism.name}" for mechanism in edition.mechanisms}
    with pytest.MonkeyPatch.context() as only:
        only.setitem(EDITIONS, split, (edition,))
        only.setitem(splits.FAMILIES, split, families)
        return [
            *negatives(split, RUNS),
            *(case for case in leaks(split, 1) if case.family in grows),
            *triggers(split),
            *stalls(split),
        ]


def fingerprint(cases: list[Case]) -> str:
    """Of how each is watched and what it holds, in whole MiB, at a few times. Cases that move may
    get another number in their name."""
    told = hashlib.sha256()
    for case in cases:
        series = case.series
        told.update(f"{case.family} {case.starts} {series.duration} {series.interval}".encode())
        for sample in replace(series, interval=series.duration / 12).samples():
            load, device = sample.load, sum(one.used or 0 for one in sample.device)
            held = ((sample.host.cgroup_anon or 0) + device) // MIB
            told.update(f" {held} {load.running} {load.waiting} {load.steps_total}".encode())
    return told.hexdigest()[:16]


@pytest.mark.parametrize("edition", [editions.TENTH, editions.ELEVENTH], ids=lambda one: one.name)
def test_an_edition_is_frozen_and_moves_sample_for_sample(edition: Edition) -> None:
    assert fingerprint(cases_of(edition)) == FROZEN[edition.name]


def test_no_family_is_in_two_splits() -> None:
    for one, other in itertools.combinations(Split, 2):
        assert not splits.FAMILIES[one].keys() & splits.FAMILIES[other].keys()
        assert not (HANGS[one] & HANGS[other]) - {"new", "known", "frontend"}
    mechanisms = [mechanism.name for split in Split for mechanism in LEAKS[split]]
    assert len(mechanisms) == len(set(mechanisms))


def test_the_test_split_is_as_large_as_its_figures_need() -> None:
    assert len(splits.FAMILIES[Split.TEST]) >= 40
    assert sum(case.series.duration for case in healthy_cases()) >= 8000 * HOUR
    assert len(pauses.FAMILIES | turns.FAMILIES) >= 8
    assert len(LEAKS[Split.TEST]) >= 15
    assert len(leaks(Split.TEST, 1)) >= 250
    assert len(triggers(Split.TEST)) >= 40
    assert len(hanging_cases()) >= 35
    assert len(HANGS[Split.TEST] - HANGS[Split.SEEN]) >= 6


def test_the_interval_of_a_run_does_not_tell_whether_it_leaks() -> None:
    """Each is about as frequent among the healthy runs as among those that leak."""
    healthy_runs = [case.series.interval for case in healthy_cases()]
    leaking = [case.series.interval for case in leaking_cases()]
    for interval in INTERVALS:
        one = healthy_runs.count(interval) / len(healthy_runs)
        other = leaking.count(interval) / len(leaking)
        assert min(one, other) > 0.08
        assert max(one, other) < 2 * min(one, other)


def test_what_an_engine_uses_at_first_does_not_tell_whether_it_leaks() -> None:
    heights = [{case.series.base for case in cases} for cases in (healthy_cases(), leaking_cases())]
    assert heights[0] == heights[1]
    assert len(heights[0]) == 3


def test_no_two_cases_have_one_name() -> None:
    tested = [*healthy_cases(), *leaking_cases(), *named(Split.TEST), *hanging_cases()]
    seen = [*triggers(Split.SEEN), *stalls(Split.SEEN)]
    for cases in (tested, seen, triggers(Split.DEVELOPMENT, 2)):
        assert len({case.name for case in cases}) == len(cases)


def test_an_edition_that_moves_keeps_its_seeds() -> None:
    """They are made from its name, not from that of its split."""
    _, ninth, tenth = EDITIONS[Split.SEEN]
    assert [one.name for one in (ninth, tenth, *EDITIONS[Split.TEST])] == [
        "test",
        "tenth",
        "eleventh",
    ]
    assert sum(case.name == "hang-known-5" for case in stalls(Split.SEEN)) == 1
    family = next(iter(kernels.FAMILIES))
    moved = splits.FAMILIES[Split.SEEN][family]
    assert isinstance(moved, Watched)
    assert (moved.edition, moved.place) == (ninth, 0)
    one, other = moved.run(family, 1), moved.run(family, 2)
    assert one.seed != other.seed
    assert [(run.duration, run.interval) for run in (one, other)] == [*HOURS[1:3]]


def test_each_mechanism_rate_and_shape_is_among_the_strata() -> None:
    chosen = strata()
    (edition,) = EDITIONS[Split.TEST]
    assert {case.family for case in chosen} == {case.family for case in leaking_cases()}
    names = {part for case in chosen for part in case.name.split("-")}
    assert names >= edition.spent_s.keys()
    assert names >= {shape for mechanism in edition.mechanisms for shape in mechanism.shapes}


def test_a_case_is_the_same_each_time_it_is_made() -> None:
    again = [
        *negatives(Split.TEST, 1),
        *leaks(Split.TEST, 1),
        *triggers(Split.TEST),
        *stalls(Split.TEST),
    ]
    made = {case.name: case for case in [*healthy_cases(), *leaking_cases(), *hanging_cases()]}
    for other in again[::4]:
        one = made[other.name]
        assert one.origin == other.origin
        first = list(itertools.islice(one.series.samples(), 40))
        assert first == list(itertools.islice(other.series.samples(), 40))
        assert first == list(itertools.islice(one.series.samples(), 40))
