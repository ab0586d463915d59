"""Every query of the generated dashboards and alerts, with its variables filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "dashboards"
NAMES = ("fleet", "service", "engine", "operator")
METRIC = re.compile(r"\bplimsoll_[a-z0-9_]+\b")


def panels(name: str) -> Iterator[tuple[str, list[str]]]:
    """Titles of a dashboard's panels and their queries as Grafana would send them."""
    for panel in json.loads((FOLDER / f"{name}.json").read_text())["panels"]:
        yield panel["title"], [filled(target["expr"]) for target in panel["targets"]]


def annotation_queries(name: str) -> list[str]:
    board = json.loads((FOLDER / f"{name}.json").read_text())
    listed = board.get("annotations", {}).get("list", [])
    return [filled(one["expr"]) for one in listed if "expr" in one]


def filled(expression: str, rate: str = "1m", whole: str = "5m") -> str:
    text = expression.replace("$__rate_interval", rate).replace("$__range", whole)
    return re.sub(r"\$(namespace|service|pod)\b", ".*", text)


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def every() -> Iterator[tuple[str, str]]:
    """Where it is, and the query."""
    for name in NAMES:
        for title, expressions in panels(name):
            for expression in expressions:
                yield f"{name}: {title}", expression
        for expression in annotation_queries(name):
            yield f"{name}: annotation", expression
    for rule in alerts():
        yield str(rule["alert"]), str(rule["expr"])
