"""Writes the generated pages: ``python -m docs.generate [--check]`` from the repository's root."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.tools import (
    crds,
    entrypoints,
    figures,
    injections,
    metrics,
    reasons,
    scale,
    sensitivity,
    support,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs"


def pages() -> dict[str, str]:
    """File name -> text."""
    return {
        "metrics.md": metrics.page(),
        "api.md": crds.page(),
        "injections.md": injections.page(),
        "not-ready.md": reasons.page(),
        "scale.md": figures.filled(scale.page(), figures.COSTS, "costs"),
        "support.md": support.page(),
        "engine-api.md": entrypoints.page("engine-api.md"),
        "design/vllm-tests.md": entrypoints.page("design/vllm-tests.md"),
        "design/detection.md": sensitivity.page(),
        "figures.md": figures.page(),
        "../README.md": figures.filled((ROOT / "README.md").read_text(), figures.README),
    }


def drift() -> list[str]:
    """The difference between what is there and what the code says, as a diff; empty if none."""
    lines: list[str] = []
    for name, text in pages().items():
        path = FOLDER / name
        found = path.read_text() if path.exists() else ""
        lines += difflib.unified_diff(
            found.splitlines(), text.splitlines(), f"docs/{name}", "generated", lineterm=""
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a page differs")
    if parser.parse_args(arguments).check:
        found = drift()
        print("\n".join(found), end="\n" if found else "")
        return int(bool(found))
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
