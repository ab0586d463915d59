"""Every panel shows something: evaluated by a real Prometheus that scraped a real leak and a real
operator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from docs.tools import scene
from tests.lab.operator import Operator, operator_kubeconfig
from tests.unit.dashboards import queries

NEEDS_A_DEVICE = {"Device memory by segment"}
"""This machine has no accelerator: a series that is unknown is absent, here too."""

SERVICE = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "tiny"},
    "spec": {"model": {"uri": "file:///models/tiny"}},
}


@pytest.mark.long
def test_every_panel_shows_something(cluster: Any, tmp_path: Path) -> None:
    kube = cluster.kube
    operator = Operator(operator_kubeconfig(kube, tmp_path / "kubeconfig"), kube.namespace)
    try:
        with scene.leak(tmp_path, {"operator": f"127.0.0.1:{operator.port}"}) as seen:
            kube.apply(SERVICE)  # while it is scraped, so that its reconciles are seen
            time.sleep(5 * scene.SCRAPE_S)
            empty = [
                f"{name}: {title}: {query}"
                for name in queries.NAMES
                for title, expressions in queries.panels(name)
                if title not in NEEDS_A_DEVICE
                for query in expressions
                if not _values(seen, query)
            ]
            assert empty == []
            for query in queries.annotations("service"):
                assert _values(seen, query), query
            for rule in queries.alerts():
                _values(seen, str(rule["expr"]))  # evaluates without an error
    finally:
        kube("delete", "plinf", "tiny", "--ignore-not-found", "--wait=false")
        operator.stop()


def _values(seen: scene.Scene, query: str) -> list[Any]:
    """Values that are numbers, of all series, over the whole run."""
    series = seen.prometheus.query_range(query, seen.began, time.time())
    return [v for one in series for _, v in one["values"] if v not in ("NaN", "+Inf", "-Inf")]
