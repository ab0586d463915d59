"""The generated JSON is what Grafana's published types say: nothing unknown, nothing lost, and the
references within a dashboard lead somewhere.

Tests ``dashboards/generate.py``.
"""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.unit.dashboards import queries

LOST = {"titleFormat", "step"}
"""Of a Prometheus annotation: Grafana reads them, the published types do not have them."""
OWN = {"__all_variables", "__from", "__interval", "__range", "__rate_interval"}
VARIABLE = re.compile(r"\$\{?(\w+)")


@pytest.fixture(params=queries.NAMES)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    text = (queries.FOLDER / f"{request.param}.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def test_the_published_types_read_and_write_it_without_loss(board: dict[str, Any]) -> None:
    register_default_plugins()
    read = Dashboard.from_json(json.loads(json.dumps(board)))
    written = json.loads(JSONEncoder(sort_keys=True).encode(read))
    for annotation in board["annotations"].get("list", []):
        for key in LOST:
            annotation.pop(key, None)
    assert written == board


def test_panels_lie_side_by_side(board: dict[str, Any]) -> None:
    boxes = [panel["gridPos"] for panel in board["panels"]]
    for box in boxes:
        assert box["x"] + box["w"] <= 24
    for a, b in combinations(boxes, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere(board: dict[str, Any]) -> None:
    assert re.fullmatch(r"[a-z-]{1,40}", board["uid"])
    known = {one["name"] for one in board["templating"]["list"]}
    used = set(VARIABLE.findall(json.dumps([board["panels"], board.get("annotations", {})])))
    assert used - OWN <= known
    assert known - {"datasource"} <= used, "a variable that no query selects by"
    for panel in board["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]
        legends = {target.get("legendFormat") for target in panel["targets"]}
        for override in panel["fieldConfig"].get("overrides") or []:
            assert override["matcher"]["options"] in legends, panel["title"]
