"""Writes dashboards/*.json and the alerts: ``python -m dashboards.generate [--check]``.

``--runbooks URL`` prints the alerts instead, with the base address of the pages of their own.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

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
        f"{name}.json": encoder.encode(_numbered(make())) + "\n" for name, make in BOARDS.items()
    }
    return boards | {
        "alerts.yaml": alerts.rules_file(),
        "prometheusrule.yaml": alerts.prometheus_rule(),
    }


def _numbered(board: Dashboard) -> models.Dashboard:
    """Panels keep their numbers, so that links to one of them go on to work."""
    made = board.build()
    for number, panel in enumerate(made.panels or [], 1):
        panel.id_val = number
    return made


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
    parser.add_argument(
        "--runbooks", metavar="URL", help="print the alerts, their pages published at URL"
    )
    asked = parser.parse_args(arguments)
    if asked.runbooks:
        print(alerts.rules_file(asked.runbooks.rstrip("/")), end="")
        return 0
    if asked.check:
        found = drift()
        print("\n".join(found), end="\n" if found else "")
        return int(bool(found))
    for name, text in files().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
