"""The list of vLLM's tests in ``docs/engine.md``, from ``bench/results/vllm-entrypoints.json``."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "engine.md"
RESULT = DOCS.parent / "bench" / "results" / "vllm-entrypoints.json"
BLOCK = re.compile(r"(<!-- vllm-entrypoints -->\n).*?(<!-- end -->)", re.DOTALL)


def page() -> str:
    """Return the page with its list as the result is now."""
    result = json.loads(RESULT.read_text())
    return BLOCK.sub(lambda found: f"{found[1]}{listed(result)}\n{found[2]}", PAGE.read_text())


def listed(result: dict[str, Any]) -> str:
    """Return the counts of each file, then each reason with its tests."""
    rows, ran = result["samples"]["tests"], result["date"][:10]
    lines = [
        f"vLLM {result['samples']['vllm']}, {ran}, commit {result['commit'][:7]}:",
        "",
        "| Tests of | Passed | Not applicable | Failed |",
        "|---|--:|--:|--:|",
    ]
    for name, group in groupby(rows, key=lambda row: row["test"].partition("::")[0]):
        found = [row["verdict"] for row in group]
        counts = [str(found.count(one)) for one in ("passed", "not applicable", "failed")]
        lines.append(f"| `{name.removesuffix('.py')}` | {' | '.join(counts)} |")
    for verdict in ("failed", "not applicable"):
        lines += _reasons(verdict, [row for row in rows if row["verdict"] == verdict])
    return "\n".join(lines)


def _reasons(verdict: str, rows: list[dict[str, str]]) -> list[str]:
    lines = ["", f"{verdict.capitalize()}:", ""] if rows else []
    for why in sorted({row["why"] for row in rows}):
        tests = sorted({_short(row["test"]) for row in rows if row["why"] == why})
        lines.append(f"- {why}: {', '.join(tests)}")
    return lines


def _short(test: str) -> str:
    """Return a test's name without its folder and parameters; of a whole file the file's."""
    file, _, name = test.partition("::")
    short = name.partition("[")[0].rpartition("::")[2]
    return f"`{short or file.rpartition('/')[2].removesuffix('.py')}`"
