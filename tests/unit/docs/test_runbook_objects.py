"""A runbook's commands find what they name, whichever way Plimsoll was installed.

Tests ``docs/tools/objects.py``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import alerts
from docs.tools import objects
from docs.tools.blocks import ROOT
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images, render_objects
from tests.lab import binaries

RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
SERVICE = {"metadata": {"name": "a"}, "spec": {"model": {"uri": "hf://a/b"}}}


def plain() -> list[dict[str, Any]]:
    """What ``kubectl apply -k config`` makes."""
    made = []
    kustomization = yaml.safe_load((ROOT / "config" / "kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        path = (ROOT / "config" / name).resolve()
        files = [path] if path.is_file() else sorted(path.glob("*.plimsoll.dev.yaml"))
        for one in files:
            made += [item for item in yaml.safe_load_all(one.read_text()) if item]
    return made


@pytest.fixture(scope="session")
def chart(helm: str) -> list[dict[str, Any]]:
    """What the quick start's ``helm install`` makes."""
    flags = ("--namespace=plimsoll-system", f"--kube-version={binaries.VERSION}")
    command = [helm, "template", "plimsoll", str(ROOT / "charts" / "plimsoll"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def containers(*installations: list[dict[str, Any]]) -> set[str]:
    made = [
        *render_objects(parse_service(SERVICE), Images("e", "s")),
        *(i for one in installations for i in one),
    ]
    pods = [item["spec"]["template"]["spec"] for item in made if item["kind"] == "Deployment"]
    return {
        one["name"] for pod in pods for one in (*pod["containers"], *pod.get("initContainers", ()))
    }


def test_every_name_in_a_runbook_exists(chart: list[dict[str, Any]]) -> None:
    installations = {"config": plain(), "the chart": chart}
    known = containers(*installations.values())
    assert {"engine", "supervisor", "operator"} <= known
    problems = [p for path in RUNBOOKS for p in objects.wrong(path, installations, known)]
    assert problems == []


def test_every_runbook_is_an_alerts() -> None:
    assert {path.stem for path in RUNBOOKS} == {rule["alert"] for rule in alerts.rules()}


def test_what_does_not_exist_is_found(tmp_path: Path, chart: list[dict[str, Any]]) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`kubectl -n plimsoll-system logs deploy/plimsoll-operator --tail=50`\n"
        "`kubectl -n elsewhere get pods`, `kubectl logs -l app=x POD`, `kubectl logs POD -c main`\n"
        "`kubectl -n NAMESPACE delete pod POD`, `kubectl get leases -l plimsoll.dev/service=NAME`\n"
        "`Frobnicated`, `LadderExhausted`, `supervision.moods`, `spec.supervision.mode: Recover`\n"
        "The weather dashboard; the service dashboard.\n"
    )
    installations = {"config": plain(), "the chart": chart}
    found = [one.split(": ")[-1] for one in objects.wrong(page, installations, {"engine"})]
    assert found == [
        "the chart has no deploy/plimsoll-operator",
        "config is not in namespace elsewhere",
        "the chart is not in namespace elsewhere",
        "config has no Pod with app=x",
        "the chart has no Pod with app=x",
        "no pod of ours has a container main",
        "no part of ours knows this word",
        "no resource and no value of the chart has this name",
        "page.md: there is no weather dashboard".removeprefix("page.md: "),
    ]
