"""The tables of the engine's pages that runs made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "research" / "bench" / "results"
BLOCK = re.compile(r"(<!-- ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(name: str) -> str:
    """Return a page of ``docs/`` with its lists as the results are now."""

    def block(found: re.Match[str]) -> str:
        result = json.loads((RESULTS / f"{found[2]}.json").read_text())
        return f"{found[1]}{_LISTS[found[2]](result)}\n{found[3]}"

    return BLOCK.sub(block, (DOCS / name).read_text())


def clients(result: dict[str, Any]) -> str:
    """Return a row for each library, with the outcome of its cases."""
    rows = result["samples"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        f"{result['date'][:10]}, commit {result['commit'][:7]}:",
        "",
        f"| Library | {' | '.join(cases)} |",
        "|---|" + "---|" * len(cases),
    ]
    for name, group in groupby(rows, key=lambda row: f"{row['library']} {row['version']}"):
        outcomes = {row["case"]: row["outcome"] for row in group}
        lines.append(f"| `{name}` | {' | '.join(outcomes.get(case, '') for case in cases)} |")
    return "\n".join(lines)


def beside(result: dict[str, Any]) -> str:
    """Return a row for each reason of a difference, with the bodies that show it."""
    figures, rows = result["figures"], result["samples"]["differences"]
    lines = [
        f"vLLM {result['samples']['vllm']}, {result['date'][:10]}, commit {result['commit'][:7]}:"
        f" {figures['differing_count']} of {figures['bodies_count']} bodies differ.",
        "",
        "| Differs | Why | Right | Bodies |",
        "|---|---|---|--:|",
    ]
    keys = [(row["differs"], row["why"], row["right"]) for row in rows]
    for key in sorted(set(keys)):
        lines.append(f"| {' | '.join(key)} | {keys.count(key)} |")
    return "\n".join(lines)


def templates(result: dict[str, Any]) -> str:
    """Return how many templates write each chat in which form."""
    counts: dict[str, dict[str, int]] = result["samples"]["chats"]
    forms = sorted({form for found in counts.values() for form in found} - {"different"})
    lines = [
        f"{result['figures']['templates_count']} templates, {result['date'][:10]}, commit"
        f" {result['commit'][:7]}, of {', '.join(result['samples']['sources'])}:",
        "",
        f"| Chat | {' | '.join(one.capitalize() for one in forms)} | Different |",
        f"|---|{'--:|' * (len(forms) + 1)}",
    ]
    for chat, found in counts.items():
        cells = [str(found.get(form, 0)) for form in forms]
        lines.append(f"| {chat} | {' | '.join(cells)} | {found.get('different', 0)} |")
    return "\n".join(lines)


def listed(result: dict[str, Any]) -> str:
    """Return the counts of each file, then each reason with its tests."""
    rows, ran = result["samples"]["tests"], result["date"][:10]
    lines = [
        f"vLLM {result['samples']['vllm']} with the model {result['samples']['model']}, {ran},"
        f" commit {result['commit'][:7]}:",
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


_LISTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "vllm-entrypoints": listed,
    "chat-templates": templates,
    "clients": clients,
    "vllm-beside": beside,
}
"""By the name of a block, which is its result's."""
