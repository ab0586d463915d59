"""The tables of docs/scale.md, docs/figures.md and the README come from results.

Tests ``docs/tools/scale.py`` and ``docs/tools/figures.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import generate
from docs.tools import figures, scale

ROW = {
    "services_count": 1000,
    "all_reconciled_s": 48.25,
    "rss_mib": 120.4,
    "change_p50_s": 0.0214,
    "steady_writes_count": 0,
}


def test_each_size_has_its_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "RESULTS", tmp_path)
    assert scale.operator() == scale.fleet() == scale.policies() == f"({scale.NONE})"
    few = {"services_count": 100, "rss_mib": 98.0}
    many = {"services_count": 5000, "rss_mib": 230.0, "steady_cpu_ratio": 0.012}
    rows = {"figures": ROW, "samples": [few, ROW, many]}
    (tmp_path / "operator.json").write_text(json.dumps(rows))
    lines = scale.operator().splitlines()
    assert lines[0] == "| InferenceServices | 100 | 1,000 | 5,000 |"
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines[2:]}
    assert [one.strip() for one in cells["memory of the operator, MiB"]] == ["98", "120", "230"]
    at_rest = cells["CPU at rest, share of a core"]
    assert [one.strip() for one in at_rest] == ["–", "–", "1.2%"]
    changed = cells["change of a service → change of its child, median, ms"]
    assert [one.strip() for one in changed] == ["–", "21", "–"]
    figures = {"supervisors_count": 2000, "get_p99_s": 0.2504}
    (tmp_path / "fleet.json").write_text(json.dumps({"figures": figures}))
    assert "| GET on the API server, p99, s | 0.250 |" in scale.fleet()


def test_writing_the_page_twice_changes_nothing() -> None:
    assert scale.page() == scale.page()
    assert scale.page().count("<!-- figures: ") == 3


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    found = json.loads((figures.RESULTS / "operator.json").read_text())["figures"]
    assert f"| {found['rss_mib']:.0f} ({found['rss_5000_mib']:.0f}) MiB; " in figures.page()
    text = (generate.ROOT / "README.md").read_text()
    assert text.count("<!-- figures -->") == 1
    assert figures.filled(text, figures.README) == text
    assert len(text.splitlines()) < 80, "the README is one screen; the rest is below docs/"


@pytest.mark.parametrize(
    ("form", "text"), [("", "1048576"), (",", "1,048,576"), ("MiB", "1"), (".1f", "1048576.0")]
)
def test_how_a_figure_is_written(form: str, text: str) -> None:
    assert format(figures.Figure(1 << 20), form) == text


def test_a_figure_that_was_not_measured_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {row.replace("_", "-") for row in ("demo", "demo_h200")}:
        (tmp_path / f"{name}.json").write_text(json.dumps({"figures": {}}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    with pytest.raises(AttributeError, match="pause_p50_s"):
        figures.table(figures.ROWS)
