"""The table of the detector's constants in docs/design, from ``research/bench/sensitivity.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "detection.md"
RESULTS = ROOT / "research" / "bench" / "results"
BLOCK = re.compile(r"(<!-- figures: sensitivity -->\n).*?(<!-- /figures -->)", re.DOTALL)
NONE = "(not measured on this commit)"
COUNTS = (
    ("false_events", "false_events_count"),
    ("missed_leaks", "missed_leaks_count"),
    ("false_restarts", "false_restarts_count"),
    ("false_stalls", "false_stalls_count"),
)
HEAD = "false events / missed leaks / false restarts / false stalls / budget consumed"
Row = Mapping[str, Any]


def page() -> str:
    """The page with the table as the result is now; without a place for it, as it is."""
    return BLOCK.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", PAGE.read_text())


def table() -> str:
    """The table, and the constants that it has no row for."""
    file = RESULTS / "sensitivity.json"
    if not file.exists():
        return NONE
    result = json.loads(file.read_bytes())
    figures, found = result["figures"], result["samples"]
    constants: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in found["moved"]:
        key = (row["module"].rpartition(".")[2], row["constant"])
        constants.setdefault(key, {})[row["moved_to"] > row["value"]] = row
    lines = [
        _unmoved(figures, result["commit"]),
        "",
        f"| Constant | Value | + 30 %: {HEAD} | − 30 % |",
        "|---|--:|---|---|",
    ]
    for (module, name), moved in constants.items():
        if any(row["runs_changed"] or row["failed"] for row in moved.values()):
            value = next(iter(moved.values()))["value"]
            later = any(f".{module}.{name} to " in one for one in found["not_run"])
            absent = "not run" if later else "rounded to itself"
            cells = " | ".join(
                _cell(moved[up], figures) if up in moved else absent for up in (True, False)
            )
            lines.append(f"| `{module}.{name}` | {value:g} | {cells} |")
    lines += [
        "",
        *_listed("Without any effect on these runs", found["without_effect"]),
        *_listed("Cannot be moved", found["not_movable"]),
        *_listed("Not run", _once(name.partition(" to ")[0] for name in found["not_run"])),
    ]
    return "\n".join(lines).rstrip()


def _unmoved(figures: Mapping[str, float], commit: str | None) -> str:
    consumed = _ratio(figures.get("consumed_p50_ratio"))
    counts = ", ".join(f"{figures[key]:g} {name.replace('_', ' ')}" for name, key in COUNTS)
    at = commit[:7] if commit else "unknown"
    return (
        f"Unmoved (commit {at}), on {figures['runs_count']:g} runs of"
        f" {figures['families_count']:g} of {figures['families_of_all_count']:g} families:"
        f" {counts}, median budget consumed {consumed}. The table shows the differences."
    )


def _cell(row: Row, figures: Mapping[str, float]) -> str:
    if row["failed"]:
        return f"to {row['moved_to']:g}: the detector fails"
    if not row["runs_changed"]:
        return "no run changes"
    counts = [_difference(row[name] - figures[key], "d") for name, key in COUNTS]
    before, after = figures.get("consumed_p50_ratio"), row["consumed_p50"]
    if before is None or after is None:
        return " / ".join([*counts, "–"])
    return " / ".join([*counts, _difference(round(after - before, 2), ".2f")])


def _difference(value: float, form: str) -> str:
    return "0" if value == 0 else f"{value:+{form}}".replace("-", "−")


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _listed(title: str, names: Iterable[str]) -> Sequence[str]:
    short = [f"`{_short(name)}`" for name in names]
    return [f"{title}: {', '.join(short)}.", ""] if short else []


def _short(name: str) -> str:
    """``growth.MIN_TAU`` of ``plimsoll_sidecar.detect.growth.MIN_TAU``."""
    found = re.fullmatch(r"(?:[a-z0-9_]+\.)*([a-z0-9_]+\..+)", name)
    return found[1] if found else name
