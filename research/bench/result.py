"""Prints a benchmark's result and writes it to ``research/bench/results/NAME.json``.

    from bench.result import publish
    publish("restart", {"pause_p50_s": 0.7}, samples=[...])

The form is :func:`plimsoll_cli.figures.result`'s: keys of figures carry their unit, and a figure
that could not be measured (None) is absent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plimsoll_cli.figures import make_result

RESULTS = Path(__file__).parent / "results"


def command() -> list[str]:
    """Return the arguments of ``python`` that started this program."""
    spec = sys.modules["__main__"].__spec__
    return list(sys.argv) if spec is None else ["-m", spec.name, *sys.argv[1:]]


def arguments_of(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share: name and folder of the result."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--name", default=name, help="of the result")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the result's folder")
    return parser


def publish(
    name: str,
    figures: Mapping[str, float | int | None],
    samples: Any = None,
    folder: Path = RESULTS,
) -> dict[str, Any]:
    """The result, after it was printed and written. ValueError for a key without a unit."""
    whole = make_result(name, figures, ["python", *command()], samples)
    text = json.dumps(whole, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(text + "\n")
    print(text)
    return whole


def add(
    name: str, part: str, figures: Mapping[str, float | int | None], folder: Path = RESULTS
) -> None:
    """Print figures and add them to a result that another benchmark wrote.

    Its ``samples`` then tell where those of ``part`` are from. ValueError for a key without a unit.
    """
    path = folder / f"{name}.json"
    new = make_result(name, figures, ["python", *command()], None)
    print(json.dumps(new, indent=2))
    whole = json.loads(path.read_bytes())
    whole["figures"] |= new["figures"]
    whole["samples"] |= {part: {key: new[key] for key in ("commit", "date", "command")}}
    path.write_text(json.dumps(whole, indent=2) + "\n")


def earlier(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and samples of the result file, or none."""
    try:
        whole = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}, {}
    return dict(whole.get("figures") or {}), dict(whole.get("samples") or {})
