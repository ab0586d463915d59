"""The scrape configuration of docs/operations.md, as a real Prometheus applies it.

Files stand in for the API server: they have the labels that Prometheus gives to discovered pods.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from docs.tools.blocks import blocks
from plimsoll_cli.local.runner import choose_free_ports

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
META = "__meta_kubernetes_"
POD_LABEL = f"{META}pod_label_"


def target(pod: str, port_name: str, phase: str = "Running", **labels: str) -> dict[str, Any]:
    """Return a port of a pod, as the discovery of pods does."""
    found = {
        f"{META}namespace": "team",
        f"{META}pod_name": pod,
        f"{META}pod_phase": phase,
        f"{META}pod_container_port_name": port_name,
    }
    own = {f"{POD_LABEL}{name}": value for name, value in labels.items()}
    return {"targets": [f"{pod}-{port_name}.invalid:1"], "labels": found | own}


def plimsoll(component: str) -> dict[str, str]:
    return {"app_kubernetes_io_name": "plimsoll", "app_kubernetes_io_component": component}


TARGETS = [
    target("service-0", "http", plimsoll_dev_service="qwen"),
    target("service-0", "metrics", plimsoll_dev_service="qwen"),
    target("evicted-0", "metrics", "Failed", plimsoll_dev_service="qwen"),
    target("policy-0", "metrics", plimsoll_dev_policy="engines"),
    target("policy-1", "metrics-9464", plimsoll_dev_policy="engines"),
    target("policy-1", "probe", plimsoll_dev_policy="engines"),
    target("other-0", "metrics"),
    target("operator-0", "http", **plimsoll("operator")),
    target("operator-0", "webhook", **plimsoll("operator")),
    target("operator-1", "http", "Succeeded", **plimsoll("operator")),
]
EXPECTED = {
    ("plimsoll", "service-0", "qwen", "team"): 2,
    ("plimsoll", "policy-0", "engines", "team"): 1,
    ("plimsoll", "policy-1", "engines", "team"): 1,
    ("plimsoll-operator", "operator-0", None, "team"): 1,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of the page, with files in place of the API server."""
    (text,) = [one.text for one in blocks(PAGE, "yaml") if "scrape_configs" in one.text]
    found = yaml.safe_load(text)
    (tmp_path / "targets.json").write_text(json.dumps(TARGETS))
    for job in found["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["file_sd_configs"] = [{"files": [str(tmp_path / "targets.json")]}]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump(found))
    return file


def test_each_supervisor_and_the_operator_are_scraped(config: Path, tmp_path: Path) -> None:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    (port,) = choose_free_ports([None])
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [binary, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            found: dict[tuple[str | None, ...], int] = {}
            deadline = time.monotonic() + 60
            while found != EXPECTED and time.monotonic() < deadline:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
                found = read_targets(port)
            assert found == EXPECTED
        finally:
            process.terminate()
            process.wait(30)


def read_targets(port: int) -> dict[tuple[str | None, ...], int]:
    """Return how many targets have each job, pod, service and namespace."""
    try:
        body = httpx.get(f"http://127.0.0.1:{port}/api/v1/targets", trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return {}
    counts: dict[tuple[str | None, ...], int] = {}
    for one in body["data"]["activeTargets"]:
        key = tuple(one["labels"].get(name) for name in ("job", "pod", "service", "namespace"))
        counts[key] = counts.get(key, 0) + 1
    return counts
