"""The result of a measurement: keys with units, nothing made up.

Tests ``plimsoll_cli/figures.py``.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_cli.figures import compute_percentile, find_commit, make_result


def test_a_result_has_the_keys_that_every_benchmark_has() -> None:
    whole = make_result(
        "demo", {"pause_p50_s": 0.12345678, "streams_count": 8}, ["plimsoll", "demo"], [1]
    )

    assert set(whole) == {"name", "date", "machine", "commit", "command", "figures", "samples"}
    assert whole["figures"] == {"pause_p50_s": 0.123457, "streams_count": 8}
    assert whole["machine"]["cpu_count"] >= 1
    assert whole["date"].endswith("Z")
    json.dumps(whole)


def test_a_figure_that_was_not_measured_is_absent() -> None:
    assert make_result("demo", {"device_bytes": None, "a_count": 0}, [])["figures"] == {
        "a_count": 0
    }


@pytest.mark.parametrize("key", ["pause", "pause_ms", "Pause_s", "_s"])
def test_a_key_without_a_unit_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="end it with a unit"):
        make_result("demo", {key: 1}, [])


def test_only_published_results_leave_a_tree_clean(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        named = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        subprocess.run(["git", "-C", str(tmp_path), *named, *arguments], check=True, timeout=10)

    published, source = (
        tmp_path / "research" / "bench" / "results" / "restart.json",
        tmp_path / "source.py",
    )
    published.parent.mkdir(parents=True)
    assert find_commit(tmp_path) is None
    git("init", "-q")
    for file in (published, source):
        file.write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = find_commit(tmp_path)
    assert head is not None
    assert not head.endswith("-dirty")

    published.write_text("2")
    assert find_commit(tmp_path) == head
    source.write_text("2")
    assert find_commit(tmp_path) == f"{head}-dirty"


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=60),
    st.sampled_from((0.0, 0.5, 0.9, 0.99, 1.0)),
)
def test_a_percentile_is_a_measured_value_with_that_share_at_or_below(
    values: list[float], share: float
) -> None:
    value = compute_percentile(values, share)

    assert value in values
    assert sum(other <= value for other in values) >= share * len(values) - 1e-9


def test_known_percentiles() -> None:
    assert compute_percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert compute_percentile([1.0, 2.0], 0.99) == 2.0
    assert compute_percentile([], 0.5) is None
