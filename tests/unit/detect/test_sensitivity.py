"""Constants that are moved alone, and the runs on which that is measured.

Tests ``bench/constants.py``, ``bench/constants_source.py``, ``bench/sensitivity_runs.py`` and
``bench/sensitivity.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import constants, sensitivity
from bench.constants import Constant
from bench.constants_source import bindings, codes, modules_of, tree_of, unnamed
from bench.detection import cases_of
from bench.detection_score import Verdict
from bench.sensitivity_runs import Outcome, cost, score, subset
from leaklab.splits import Split

NAME = "plimsoll_sidecar.moved_in_a_test"
SOURCE = '''
"""A module with constants of every form."""
from dataclasses import dataclass
from msgspec import Struct

LIMIT = 0.5
FIRST, SECOND = 10, 4.0
STEPS = (1.0, 30)
BY_KIND = {"host": 3.0}
DERIVED = LIMIT * 2
ONLY_ON_IMPORT = 7.0
AFTERWARDS = ONLY_ON_IMPORT + 1
NOTHING, FLAG, WORD, ONE = 0.0, True, "x", 1

@dataclass(frozen=True)
class Thresholds:
    threshold_odds: float = 99.0
    count: int = 5

class Times(Struct, frozen=True):
    wait_s: float = 8.0

USED, TIMES = Thresholds(), Times()

def limit(share=LIMIT, *, factor=1.5):
    return LIMIT, share, factor

def others():
    return FIRST, SECOND, STEPS, BY_KIND["host"], DERIVED, AFTERWARDS, 0.125 + round(2.5, 3)

class Reader:
    @staticmethod
    def read(times=Times(), patience_s=3.0):
        return USED.threshold_odds, USED.count, TIMES.wait_s, times.wait_s, patience_s, ONE
'''
READER = f"""
from {NAME} import LIMIT as BOUND, others

def bound():
    return BOUND
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    package = __import__("plimsoll_sidecar")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    (tmp_path / "moved_in_a_test.py").write_text(SOURCE)
    (tmp_path / "reads_in_a_test.py").write_text(READER)
    for cached in (tree_of, bindings, codes):
        cached.cache_clear()
    modules_of([NAME, "plimsoll_sidecar.reads_in_a_test"])
    yield NAME
    for name in (NAME, "plimsoll_sidecar.reads_in_a_test"):
        del sys.modules[name]
    for cached in (tree_of, bindings, codes):
        cached.cache_clear()


def found(module: str) -> dict[str, Constant]:
    return {one.label: one for one in constants.constants_of(sys.modules[module])}


def values(module: str) -> dict[str, object]:
    here, reader = sys.modules[module], sys.modules["plimsoll_sidecar.reads_in_a_test"]
    return {
        "limit": here.limit(),
        "others": here.others(),
        "read": here.Reader.read(),
        "imported": reader.bound(),
    }


def test_every_form_of_constant_is_found(module: str) -> None:
    assert list(found(module)) == [
        "LIMIT", "FIRST", "SECOND", "STEPS[0]", "STEPS[1]", "BY_KIND.host", "DERIVED",
        "ONLY_ON_IMPORT", "AFTERWARDS", "NOTHING", "ONE", "USED.threshold_odds", "USED.count",
        "TIMES.wait_s",
        "limit(factor)", "Reader.read(times).wait_s", "Reader.read(patience_s)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("label", "value", "changed"),
    [
        ("LIMIT", 0.65, {"limit": (0.65, 0.65, 1.5), "imported": 0.65}),
        ("FIRST", 13, {"others": (13, 4.0, (1.0, 30), 3.0, 1.0, 8.0, 2.625)}),
        ("STEPS[1]", 39, {"others": (10, 4.0, (1.0, 39), 3.0, 1.0, 8.0, 2.625)}),
        ("BY_KIND.host", 3.9, {"others": (10, 4.0, (1.0, 30), 3.9, 1.0, 8.0, 2.625)}),
        ("USED.threshold_odds", 128.7, {"read": (128.7, 5, 8.0, 8.0, 3.0, 1)}),
        ("TIMES.wait_s", 10.4, {"read": (99.0, 5, 10.4, 8.0, 3.0, 1)}),
        ("limit(factor)", 1.95, {"limit": (0.5, 0.5, 1.95)}),
        ("Reader.read(times).wait_s", 10.4, {"read": (99.0, 5, 8.0, 10.4, 3.0, 1)}),
        ("Reader.read(patience_s)", 3.9, {"read": (99.0, 5, 8.0, 8.0, 3.9, 1)}),
    ],
)
def test_one_constant_moves_and_comes_back(
    module: str, label: str, value: float, changed: dict[str, object]
) -> None:
    before, one = values(module), found(module)[label]
    assert constants.target(one, 1.3) == value
    with constants.moved(one, value):
        assert values(module) == before | changed
    assert values(module) == before


def test_what_cannot_be_moved_says_why(module: str) -> None:
    here = found(module)
    assert constants.stuck(here["LIMIT"]) is None
    assert "computed on import" in (constants.stuck(here["ONLY_ON_IMPORT"]) or "")
    assert "0.0" in (constants.stuck(here["NOTHING"]) or "")
    assert constants.target(here["ONE"], 1.3) is constants.target(here["ONE"], 0.7) is None
    assert unnamed(sys.modules[module]) == ["line 29: 0.125"]


def test_the_readers_of_a_constant_are_known(module: str) -> None:
    here = found(module)

    def readers(label: str) -> set[str]:
        # By name: modules that other tests have loaded may have constants of the same name.
        return {name for file, _, name in constants.users(here[label]) if "in_a_test" in file}

    assert readers("LIMIT") == {"limit", "bound"}
    assert readers("STEPS[0]") == {"others"}
    assert readers("USED.threshold_odds") == readers("Reader.read(patience_s)") == {"read"}
    assert readers("limit(factor)") == {"limit"}


def test_only_runs_that_call_a_reader_are_repeated(module: str) -> None:
    here = found(module)
    called = [constants.users(here["LIMIT"]), constants.users(here["FIRST"]), frozenset()]
    made, stuck = sensitivity.all_moved([here["LIMIT"], here["STEPS[0]"], here["ONE"]], called)
    assert [(one.constant.label, one.value, one.runs) for one in made] == [
        ("LIMIT", 0.65, [0]), ("LIMIT", 0.35, [0]), ("STEPS[0]", 1.3, [1]), ("STEPS[0]", 0.7, [1]),
    ]  # fmt: skip
    assert stuck == {f"{NAME}.ONE": "1 moved by 30 % is rounded to itself"}


def test_the_part_is_fixed_has_every_family_and_only_grows() -> None:
    every = cases_of(Split.DEVELOPMENT, False)
    small, large = subset(every, 0.05), subset(every, 0.3)
    assert [case.name for case in subset(every[::-1], 0.05)] == [case.name for case in small]
    assert large[: len(small)] == small
    assert len({case.family for case in small}) == len(small), "no family twice before all once"
    assert {case.kind for case in small} >= {"HostGrowth", "Stall", None}
    assert {case.family for case in large} == {case.family for case in every}
    assert sum(map(cost, large)) <= 0.3 * sum(map(cost, every)) + max(map(cost, every))


def test_a_score_counts_leaks_and_stalls_apart() -> None:
    verdicts = [
        Verdict("a", "leak x", True, 1.0, delay_s=5.0, consumed=0.2),
        Verdict("b", "leak x", True, 1.0, false=1),
        Verdict("c", "stall new", True, 1.0),
        Verdict("d", "noise", False, 5.0, false=2, false_stalls=1, actions=1),
    ]
    told = score([Outcome(one) for one in verdicts])
    assert (told.false_events, told.missed_leaks, told.false_restarts) == (3, 1, 1)
    assert (told.consumed_p50, told.false_stalls, told.missed_stalls) == (0.2, 1, 1)


def test_a_constant_without_effect_changed_nothing_in_any_direction() -> None:
    rows = [
        {"module": "m", "constant": name, "runs_changed": changed, "failed": failed}
        for name, changed, failed in (
            ("A", 0, None), ("A", 0, None), ("B", 0, None), ("B", 3, None), ("C", 0, "an error"),
        )
    ]  # fmt: skip
    assert sensitivity.without_effect(rows) == ["m.A"]
    later = [sensitivity.Moved(Constant("m", "A", 1.0), 0.7, [])]
    assert sensitivity.without_effect(rows, later) == []


def test_moved_constants_of_the_detector_change_what_is_judged() -> None:
    """A hundredth of each in turn: the fast leak is confirmed at another time, or not at all."""
    rooms = ("baseline", "growth", "leak", "odds", "slow_leak", "thresholds")
    modules = modules_of([f"plimsoll_sidecar.detect.{room}" for room in rooms])
    found = [one for module in modules for one in constants.constants_of(module)]
    (case,) = [one for one in cases_of(Split.DEVELOPMENT, False) if one.name == "named-fast-0"]
    sensitivity._work.cases = [case]
    unmoved, called = sensitivity._unmoved(0)
    made, _ = sensitivity.all_moved(found, [called])
    sensitivity._work.moved = [
        sensitivity.Moved(one.constant, one.value / 100, one.runs) for one in made if one.runs
    ]
    assert unmoved.verdict.delay_s is not None
    assert sensitivity._judged(case) == unmoved
    numbers = range(len(sensitivity._work.moved))
    assert any(sensitivity._with_moved((which, 0))[2] != unmoved for which in numbers)
    assert sensitivity._judged(case) == unmoved, "every constant is back"


def interrupted(task: tuple[int, int]) -> tuple[int, int, Outcome, float]:
    """The first constant is judged; the second is interrupted."""
    if task[0]:
        raise KeyboardInterrupt
    return *task, Outcome(Verdict("a", "noise", False, 1.0, false=1)), 0.5


def test_what_was_judged_before_an_interruption_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = Constant("m", "LIMIT", 1.0)
    monkeypatch.setattr(sensitivity, "_with_moved", interrupted)
    moved = [sensitivity.Moved(constant, value, [0]) for value in (1.3, 0.7)]
    monkeypatch.setattr(sensitivity._work, "moved", moved)
    unmoved = [Outcome(Verdict("a", "noise", False, 1.0))]
    (done,) = sensitivity.judge_moved(unmoved, 1, float("inf"))
    assert (done.value, done.changed, done.cpu_s) == (1.3, 1, 0.5)
    assert done.score is not None
    assert done.score.false_events == 1
