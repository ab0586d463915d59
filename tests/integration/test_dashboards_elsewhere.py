"""The dashboards beyond Grafana: Perses takes all of them over, and their panels show a real vLLM.

Tests ``docs/tools/recorded.py`` too.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs.tools import recorded
from tests.lab import binaries
from tests.lab.errors import MissingError
from tests.unit.dashboards import queries

CHARTS = {
    "timeseries": "TimeSeriesChart", "stat": "StatChart", "bargauge": "BarChart",
}  # fmt: skip
"""Grafana's panels -> those of Perses. What it cannot migrate becomes a Markdown panel."""
DEVICE = "Device growth that nothing explains"


def percli(*arguments: str) -> str:
    """What Perses' command line prints."""
    try:
        program, schemas = binaries.perses()
    except MissingError as error:
        pytest.skip(str(error))
    kinds = {"charts": "panels", "queries": "queries", "variables": "variables"}
    if arguments[0] == "lint":
        kinds["datasources"] = "datasources"
    flags = [f"--schemas.{flag}={schemas / folder}" for flag, folder in kinds.items()]
    done = subprocess.run(
        [str(program), *arguments, *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", queries.NAMES)
def test_perses_takes_a_dashboard_over_whole(name: str, tmp_path: Path) -> None:
    file = queries.FOLDER / f"{name}.json"
    board = json.loads(file.read_text())
    text = percli("migrate", f"--file={file}", "--output=json")
    spec = json.loads(text)["spec"]
    panels: list[dict[str, Any]] = [one["spec"] for one in spec["panels"].values()]
    wanted = sorted((one["title"], CHARTS[one["type"]]) for one in board["panels"])
    assert sorted((one["display"]["name"], one["plugin"]["kind"]) for one in panels) == wanted
    asked = sorted(
        query["spec"]["plugin"]["spec"]["query"] for one in panels for query in one["queries"]
    )
    assert asked == sorted(target["expr"] for one in board["panels"] for target in one["targets"])
    variables = [one["spec"]["name"] for one in spec["variables"]]
    assert variables == [one["name"] for one in board["templating"]["list"]]
    migrated = tmp_path / "migrated.json"
    migrated.write_text(text)
    percli("lint", f"--file={migrated}")


@pytest.mark.long
def test_panels_show_what_a_real_vllm_did(tmp_path: Path) -> None:
    """The leak of the recording is in the picture's panels, and only of the host."""
    shown = dict(queries.panels("service"))
    with recorded.scene_of(recorded.RECORDING, tmp_path) as seen:
        last = {}
        for title in (*recorded.PANELS, DEVICE):
            found = [seen.prometheus.query(query, seen.ended) for query in shown[title]]
            assert all(found), title
            last[title] = float(found[0][0]["value"][1])
    assert last["Host growth that nothing explains"] == pytest.approx(266e6, rel=0.1)
    assert last[DEVICE] < 1e6
    assert last["Time to exhaustion"] == 0
