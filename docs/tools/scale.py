"""The tables of docs/scale.md, from what the benchmarks of the operator and the fleet wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "research" / "bench" / "results"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
NONE = "not measured on this commit"

OPERATOR = (
    ("all children and status written, s", "all_reconciled_s", ".1f"),
    ("memory of the operator, MiB", "rss_mib", ".0f"),
    ("CPU at rest, share of a core", "steady_cpu_ratio", ".1%"),
    ("requests per second at rest", "steady_requests_per_s", ".2f"),
    ("writes at rest in 30 s", "steady_writes_count", ".0f"),
    ("change of a service → change of its child, median, ms", "change_p50_s", "ms"),
    ("the same, slowest of 50, ms", "change_max_s", "ms"),
    ("writes at a restart", "restart_writes_count", ".0f"),
    ("peak memory at a restart, MiB", "restart_rss_mib", ".0f"),
    ("longest wait of a probe at a restart, ms", "restart_probe_max_s", "ms"),
    ("repair of drift made while it was away, s", "drift_repaired_s", ".2f"),
)
FLEET = (
    ("supervisors", "supervisors_count", ".0f"),
    ("GET on the API server, p99, s", "get_p99_s", ".3f"),
    ("incidents recorded", "incidents_recorded_count", ".0f"),
    ("incidents recorded twice", "incidents_twice_count", ".0f"),
    ("restarts in 300 s", "restarts_count", ".0f"),
    ("most slots held at once (limit 20)", "slots_held_most_count", ".0f"),
    ("restarts above the limit", "breaker_exceeded_count", ".0f"),
    ("last bad revision named after, s", "revision_named_last_s", ".0f"),
)
POLICIES = (
    ("admission at 50 pods a second, median, ms", "admission_p50_s", "ms"),
    ("the same, p99, ms", "admission_p99_s", "ms"),
    ("pods created", "pods_count", ".0f"),
    ("of them with a supervisor", "injected_count", ".0f"),
    ("pods supervised at rest", "supervised_pods_count", ".0f"),
    ("memory of the operator then, MiB", "rss_mib", ".0f"),
    ("CPU then, share of a core", "steady_cpu_ratio", ".1%"),
    ("requests per second then", "steady_requests_per_s", ".2f"),
    ("writes then, in 60 s", "steady_writes_count", ".0f"),
)


def page() -> str:
    """The page with its tables as the results are now."""
    tables = {"operator": operator, "fleet": fleet, "policies": policies}
    return BLOCK.sub(lambda found: f"{found[1]}{tables[found[2]]()}\n{found[3]}", PAGE.read_text())


def operator() -> str:
    """A column for each size."""
    columns = _result("operator").get("samples") or []
    if not columns:
        return f"({NONE})"
    head = "| InferenceServices | " + " | ".join(f"{c['services_count']:,}" for c in columns) + " |"
    lines = [head, "|---|" + "--:|" * len(columns)]
    for label, key, form in OPERATOR:
        cells = " | ".join(_cell(column.get(key), form) for column in columns)
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines)


def fleet() -> str:
    """Supervisors that all find the same leak."""
    return _table("fleet", "With the same leak everywhere", FLEET)


def policies() -> str:
    """Pods that a SupervisionPolicy supervises."""
    return _table("admission", "Under one SupervisionPolicy", POLICIES)


def _table(result: str, title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    figures = _result(result).get("figures")
    if not figures:
        return f"({NONE})"
    cells = [f"| {label} | {_cell(figures.get(key), form)} |" for label, key, form in rows]
    return "\n".join([f"| {title} | |", "|---|--:|", *cells])


def _result(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f}" if form == "ms" else format(value, form)
