"""The webhook of the plain manifests is the chart's, and the API server takes both alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools.blocks import ROOT, blocks
from plimsoll_operator.config import parse_config
from tests.lab import binaries
from tests.lab.helm import CHART, RELEASE, Helm
from tests.lab.kube import Kube
from tests.lab.lab import Lab
from tests.lab.webhook import NAMESPACE

THIS = "tests/cluster/test_config_webhook.py"
Object = dict[str, Any]


@pytest.fixture
def kube(cluster: Lab) -> Kube:
    """The administrator, in the operator's namespace."""
    cluster.kube("apply", "-f", str(ROOT / "config" / "namespace.yaml"))
    return Kube(cluster.kube.kubectl, cluster.kubeconfig, NAMESPACE)


@pytest.fixture
def built(kube: Kube, tmp_path: Path) -> list[Object]:
    """What kustomize makes of ``config/`` with what the page adds to it."""
    for folder in ("config", "crds"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    page = ROOT / "docs" / "adopt.md"
    (added,) = (one.text for one in blocks(page, "yaml") if "components:" in one.text)
    with (tmp_path / "config" / "kustomization.yaml").open("a") as file:
        file.write(added + "\n")
    (block,) = (one for one in blocks(page, "sh") if one.run == THIS)
    assert block.text.strip() == "kubectl apply --server-side -k config"
    return list(yaml.safe_load_all(kube("kustomize", str(tmp_path / "config"))))


def of_webhook(documents: list[Object]) -> dict[str, Object]:
    """The webhook's objects by kind, without the labels of the chart and of the operator."""
    named = [one for one in documents if one["metadata"]["name"] == f"{RELEASE}-webhook"]
    for one in named:
        one["metadata"].pop("labels", None)
        (one.get("spec") or {}).pop("selector", None)
    return {one["kind"]: one for one in named}


def test_the_component_has_what_the_chart_has(kube: Kube, built: list[Object]) -> None:
    values = {"webhook": {"enabled": True}, "serviceAccount": {"name": "plimsoll-operator"}}
    flags = ("--show-only=templates/webhook.yaml", f"--kube-version={binaries.VERSION}")
    text = Helm(binaries.helm(4), kube)("template", RELEASE, str(CHART), *flags, values=values)
    chart = of_webhook([one for one in yaml.safe_load_all(text) if one])
    assert of_webhook(built) == chart
    assert len(chart) == 7


def test_all_images_follow_the_kustomization(kube: Kube, tmp_path: Path) -> None:
    """Also those that the operator gets by variables, with another registry and by digest."""
    for folder in ("config", "crds"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    file = tmp_path / "config" / "kustomization.yaml"
    kustomization = yaml.safe_load(file.read_text())
    digest = f"sha256:{'a' * 64}"
    parts = ("operator", "supervisor", "engine")
    names = {part: f"registry.example/team/plimsoll-{part}" for part in parts}
    kustomization["images"] = [
        {"name": f"plimsoll-{part}", "newName": name, "digest": digest}
        for part, name in names.items()
    ]
    file.write_text(yaml.safe_dump(kustomization))
    made = yaml.safe_load_all(kube("kustomize", str(tmp_path / "config")))
    (operator,) = (one for one in made if one["kind"] == "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    images = parse_config(container["args"], environ=variables).images
    found = {"operator": container["image"], "supervisor": images.supervisor}
    found["engine"] = images.engine
    assert found == {part: f"{name}@{digest}" for part, name in names.items()}


def test_the_operator_serves_it_and_its_service_finds_the_operator(
    kube: Kube, built: list[Object]
) -> None:
    (operator,) = (one for one in built if one["kind"] == "Deployment")
    template = operator["spec"]["template"]
    (container,) = template["spec"]["containers"]
    config = parse_config(container["args"], environ={})
    assert config.webhook is not None
    assert (config.webhook.namespace, config.webhook.name) == (NAMESPACE, f"{RELEASE}-webhook")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["webhook"] == config.webhook.port
    service = next(one for one in built if one["kind"] == "Service")
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    text = yaml.safe_dump_all(one for one in built if one["kind"] != "CustomResourceDefinition")
    applied = kube("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-",
                   stdin=text)  # fmt: skip
    assert f"deployment.apps/{operator['metadata']['name']} serverside-applied" in applied
