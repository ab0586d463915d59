"""Dashboards and alerts: generated, parsed by promtool, made of metrics that the code exposes.

Tests ``dashboards/generate.py`` and ``dashboards/alerts.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dashboards import generate
from docs.tools import metrics
from plimsoll_operator.render.monitoring import RUNBOOKS_URL
from tests.unit.dashboards import queries

RULES_TEST = Path(__file__).with_name("alerts_test.yaml")
SERIES_TEST = Path(__file__).with_name("series_test.yaml")


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_files_are_what_the_code_says() -> None:
    assert generate.drift() == [], "run: python -m dashboards.generate"


def test_every_query_is_parsed_by_prometheus(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{index}", "expr": query}
        for index, (_, query) in enumerate(queries.every())
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))
    assert len(rules) > 60


def test_every_metric_in_a_query_exists_in_the_code() -> None:
    known = {name for family in metrics.every() for name in family.series}
    for where, query in queries.every():
        assert set(queries.METRIC.findall(query)) <= known, where


def test_every_metric_of_a_supervisor_is_shown() -> None:
    shown = {name for _, query in queries.every() for name in queries.METRIC.findall(query)}
    hidden = {
        "plimsoll_supervisor_sample_seconds", "plimsoll_supervisor_journal_writable",
        "plimsoll_supervisor_config_valid", "plimsoll_supervisor_publish_backlog",
        "plimsoll_supervisor_journal_damaged_total",
        "plimsoll_pod_info",  # to join the others with roles
    }  # fmt: skip
    for family in metrics.supervisor():
        assert family.name in hidden or shown & {*family.series}, family.name


def test_every_metric_of_the_webhook_is_shown() -> None:
    shown = {name for _, query in queries.every() for name in queries.METRIC.findall(query)}
    of_webhook = [one for one in metrics.every() if "_webhook_" in one.name]
    assert len(of_webhook) >= 2
    for family in of_webhook:
        assert shown & {*family.series}, family.name


def test_rules_fire_and_stay_quiet() -> None:
    promtool("check", "rules", str(queries.FOLDER / "alerts.yaml"))
    promtool("test", "rules", str(RULES_TEST), str(SERIES_TEST))
    cases = yaml.safe_load(RULES_TEST.read_text())["tests"]
    tested: dict[str, set[bool]] = {}
    for case in cases:
        for one in case["alert_rule_test"]:
            tested.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert tested == {str(rule["alert"]): {True, False} for rule in queries.alerts()}


def test_the_ages_of_a_standby_are_not_shown(tmp_path: Path) -> None:
    """It watches policies alone, so that its ages grow while nothing is wrong."""
    ages = [
        query
        for _, expressions in queries.panels("operator")
        for query in expressions
        if "_watch_" in query and "_age_" in query
    ]
    assert len(ages) == 3
    series = [
        {"series": f'{name}{{job="o",instance="{pod}"}}', "values": f"{value}x5"}
        for pod, leads, age in (("a", 1, 2), ("b", 0, 90_000))
        for name, value in (
            ("plimsoll_operator_leader", leads),
            ("plimsoll_operator_watch_age_seconds", age),
            ("plimsoll_operator_watch_kind_age_seconds", age),
        )
    ]
    checks = [
        {"expr": query, "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": 2}]}
        for query in ages
    ]
    file = tmp_path / "ages.yaml"
    cases = [{"interval": "1m", "input_series": series, "promql_expr_test": checks}]
    file.write_text(yaml.safe_dump({"tests": cases}))
    promtool("test", "rules", str(file))


def test_nothing_is_shown_and_nothing_fires_where_nothing_is_scraped(tmp_path: Path) -> None:
    """Unknown is never zero: an operator that is not scraped has no zero failures."""
    checks = [{"expr": query, "eval_time": "2m", "exp_samples": []} for _, query in queries.every()]
    file = tmp_path / "nothing.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"input_series": [], "promql_expr_test": checks}]}))
    promtool("test", "rules", str(file))


def test_every_alert_says_what_to_do() -> None:
    for rule in queries.alerts():
        notes, name = rule["annotations"], str(rule["alert"])
        assert isinstance(notes, dict)
        assert {"summary", "description", "runbook_url", "dashboard"} == set(notes)
        below = notes["runbook_url"].removeprefix(f"{RUNBOOKS_URL}/")
        page = queries.ROOT / "docs" / "runbooks" / below
        assert page.read_text().startswith(f"# {name}\n")
        board = notes["dashboard"].removeprefix("/d/plimsoll-").partition("?")[0]
        assert (queries.FOLDER / f"{board}.json").exists()


def test_pages_may_be_published_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--runbooks", "https://wiki.example/plimsoll/"]) == 0
    for group in yaml.safe_load(capsys.readouterr().out)["groups"]:
        for rule in group["rules"]:
            url = rule["annotations"]["runbook_url"]
            assert url == f"https://wiki.example/plimsoll/{rule['alert']}.md"


def test_the_prometheus_rule_holds_the_same_rules() -> None:
    resource = yaml.safe_load((queries.FOLDER / "prometheusrule.yaml").read_text())
    plain = yaml.safe_load((queries.FOLDER / "alerts.yaml").read_text())
    assert resource["spec"] == plain


def test_every_panel_has_a_unit_a_description_and_a_legend() -> None:
    for name in queries.NAMES:
        panels = json.loads((queries.FOLDER / f"{name}.json").read_text())["panels"]
        assert len({panel["title"] for panel in panels if panel["gridPos"]["h"] > 4}) > 5
        for panel in panels:
            assert panel["description"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            if panel["type"] == "timeseries":
                assert panel["options"]["legend"]["showLegend"] is True, panel["title"]
                assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_the_mixin_has_the_same_boards_and_alerts() -> None:
    """As Jsonnet itself evaluates it, with the pages of the runbooks published elsewhere."""
    program = (
        "import _jsonnet, sys\n"
        "text = \"local m = (import 'mixin.libsonnet') + {_config+:: {runbooks: 'https://w.example'}};"
        ' {boards: m.grafanaDashboards, alerts: m.prometheusAlerts}"\n'
        "print(_jsonnet.evaluate_snippet('mixin', text, jpathdir=sys.argv[1]))\n"
    )
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run(
        [uv, "run", "--no-project", "--with", "jsonnet==0.21.0", "python", "-c", program,
         queries.FOLDER],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if "error sending request" in done.stderr:
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["boards"] == {
        f"plimsoll-{name}.json": json.loads((queries.FOLDER / f"{name}.json").read_text())
        for name in queries.NAMES
    }
    moved = (queries.FOLDER / "alerts.yaml").read_text().replace(RUNBOOKS_URL, "https://w.example")
    assert made["alerts"] == yaml.safe_load(moved)
