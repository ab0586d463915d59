"""Writes dashboards/*.json and the alerts: ``python -m dashboards.generate [--check]``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import alerts
from dashboards.engine import engine
from dashboards.fleet import fleet
from dashboards.operator import operator
from dashboards.service import service

FOLDER = Path(__file__).resolve().parent
BOARDS = {"fleet": fleet, "service": service, "engine": engine, "operator": operator}


def files() -> dict[str, str]:
    """File name -> text."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    boards = {
        f"{name}.json": encoder.encode(make().build()) + "\n" for name, make in BOARDS.items()
    }
    return boards | {
        "alerts.yaml": alerts.rules_file(),
        "prometheusrule.yaml": alerts.prometheus_rule(),
    }


def drift() -> list[str]:
    """The difference between what is there and what the code says, as a diff; empty if none."""
    found: list[str] = []
    for name, text in files().items():
        path = FOLDER / name
        old = path.read_text() if path.exists() else ""
        found += difflib.unified_diff(
            old.splitlines(), text.splitlines(), f"dashboards/{name}", "generated", lineterm=""
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dashboards.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a file differs")
    if parser.parse_args(arguments).check:
        found = drift()
        print("\n".join(found), end="\n" if found else "")
        return int(bool(found))
    for name, text in files().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
